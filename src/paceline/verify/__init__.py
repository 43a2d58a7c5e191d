"""Draft trees, and the rules that accept their tokens."""
