"""Finding and reading a model's files, which are untrusted input."""
