"""Readers for all checkpoint layouts of models and drafters."""
