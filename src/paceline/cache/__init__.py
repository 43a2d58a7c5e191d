"""The slab KV cache and attention over it."""
