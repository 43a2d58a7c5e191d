"""The loop: plan, draft, forward, accept, commit, emit."""
