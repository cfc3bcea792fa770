"""Proof of a run from its journals: what really happened, told apart from what the servers say of themselves."""
