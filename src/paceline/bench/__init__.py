"""Measurements: `paceline bench`, `doctor`, `perplexity`, `replay` and `tune`."""
