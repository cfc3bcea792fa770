"""The control plane of one process: the coordinator's verbs, its lease, and what is written to storage."""
