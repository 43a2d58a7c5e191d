"""Training of drafters: prompts, the target's own answers, documents, recipes and the training loop."""
