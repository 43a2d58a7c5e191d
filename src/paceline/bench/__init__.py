"""Measuring: `paceline bench`, `paceline doctor` and `paceline perplexity`."""
