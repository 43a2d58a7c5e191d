"""The native decoder, models of transformers as targets, and the networks of learned drafters."""
