"""Recordings of replies (token ids, seeds, sampling parameters), used to measure any drafter later."""
