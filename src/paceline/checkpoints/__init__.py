"""Readers of checkpoints in all layouts, for models and drafters."""
