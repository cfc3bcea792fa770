"""`make demo`: the main job of the project on a real Kubernetes, and the proof that it was done."""
