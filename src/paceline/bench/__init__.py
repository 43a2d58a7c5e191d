"""`paceline bench`: drafters, and other programs, side by side on the same questions."""
