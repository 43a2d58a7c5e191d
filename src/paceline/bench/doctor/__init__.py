"""`paceline doctor`: the gain of speculation on this machine, and its limits."""
