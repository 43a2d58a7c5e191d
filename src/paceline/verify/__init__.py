"""Draft trees, and the rules for accepting their tokens."""
