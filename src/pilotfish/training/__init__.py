"""Training of draft heads: capture the target's states, train, evaluate, export."""
