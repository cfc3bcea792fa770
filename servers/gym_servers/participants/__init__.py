"""The participants: what is live, what blocks a checkpoint, what a boundary is; export and install. No HTTP."""
