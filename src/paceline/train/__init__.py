"""Training of a drafter for a target: prompts, the target's own answers, documents, the loop and its recipes."""
