"""The kinds of gymops.dev: typed spec and status, condition types and reasons, and every name in use."""
