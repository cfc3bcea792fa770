"""Agents: the turn loop between a policy model and tools."""
