"""Images in prompts: reading pictures, and encoding them for models that accept images."""
