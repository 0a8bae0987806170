"""The benchmark: decoders by name, on real servers, interleaved, as a ratio to plain decoding."""
