"""`paceline doctor`: what speculation gives on this machine, and what limits it."""
