"""The trace lab: what every shape accepts at every token of real answers, recorded once; any policy replayed on it in seconds."""
