"""Decoding replayed without a server: what chains of drafts, a policy or the memory would have reached on known answers."""
