"""The drafters: lookups, draft models, learned heads, and cascades of several drafters."""
