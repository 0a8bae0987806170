"""Decoding with chains of drafts replayed without a server, for the study of the memory."""
