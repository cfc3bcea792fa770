"""Coordination of one cell: checkpoints, death, recovery. One code for the operator and the local runner."""
