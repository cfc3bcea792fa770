"""The policy model server: a rollout's calls to an inference engine, in token ids."""
