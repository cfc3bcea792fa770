"""Pure decisions: from what is wanted and what is seen to what is done. No clock, no randomness, no I/O."""
