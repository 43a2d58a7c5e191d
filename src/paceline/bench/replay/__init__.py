"""`paceline replay` and `paceline tune`: running drafters over recorded texts without the target."""
