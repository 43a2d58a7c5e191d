"""`paceline replay` and `paceline tune`: drafters over a recorded text, without the target."""
