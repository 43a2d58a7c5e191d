"""Drafters, one per file: n-gram lookup, suffix automaton, draft model, and a stack of several."""
