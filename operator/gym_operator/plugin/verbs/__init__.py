"""The verbs, one a module: each asks, waits where it is told to, and shows."""
