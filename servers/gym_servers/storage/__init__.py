"""Checkpoints at rest: immutable objects, packs and manifests, and the one write that publishes."""
