"""Turning a row of logits into a token: parameters, processors, truncation, noise and grammars."""
