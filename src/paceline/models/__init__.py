"""The native decoder and what reads models into it."""
