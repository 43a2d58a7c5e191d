"""Learning from a server's own traffic: `paceline serve --learn DIR`."""
