"""Checkpointed Gym servers: rollouts that survive the death of the process they run in."""
