"""Tokenizers, chat templates, and the bytes of tokens."""
