"""Finding and reading a model's files, which may come from anyone."""
