"""The choice of a token from a row of logits: parameters, processors, truncation, noise and grammars."""
