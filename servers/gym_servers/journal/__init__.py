"""Journals: what really happened, kept outside of what may be killed. The proofs count from them."""
