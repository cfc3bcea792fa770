"""The only code that speaks to Kubernetes, to participants and to storage."""
