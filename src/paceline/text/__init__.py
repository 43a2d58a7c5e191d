"""Tokenizers, chat templates, and the sandbox in which untrusted jobs run."""
