"""The native decoder, and the code that loads models into it."""
