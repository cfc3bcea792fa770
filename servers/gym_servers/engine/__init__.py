"""A scripted inference engine: a process of its own in the place of vLLM, deterministic, and journaled."""
