"""Resources servers: tools and session state, and the verifiers that score a rollout."""
