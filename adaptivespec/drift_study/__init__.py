"""What the DRIFT memory is worth: chains of drafts replayed offline, with and without it."""
