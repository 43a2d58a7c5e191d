"""Tokenizers, chat templates, and the sandbox for untrusted jobs."""
