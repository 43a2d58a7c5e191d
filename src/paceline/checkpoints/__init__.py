"""Checkpoints of every layout, read into models and drafters."""
