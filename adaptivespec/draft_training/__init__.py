"""Training of an EAGLE-3 draft for the demo target: corpus, target states, draft model, loss and loop."""
