"""Images in prompts: reading them, encoding them with a model's vision tower, and placing them among tokens."""
