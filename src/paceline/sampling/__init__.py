"""From a row of logits to a token: parameters, processors, truncation, noise, grammars."""
