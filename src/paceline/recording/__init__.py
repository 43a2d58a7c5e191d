"""Recordings: replies as token ids with their seeds and sampling parameters, the text under every drafter."""
