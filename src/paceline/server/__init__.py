"""An OpenAI-compatible server: `paceline serve`."""
