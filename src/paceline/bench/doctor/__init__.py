"""`paceline doctor`: what speculation gives on this machine, and why it gives no more."""
