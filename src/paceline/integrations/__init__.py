"""Integrations with other libraries: transformers and Ray Serve."""
