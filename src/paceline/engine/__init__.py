"""The loop: draft, verify, commit, stream."""
