"""Tokenizers, chat templates, and the bytes that tokens stand for."""
