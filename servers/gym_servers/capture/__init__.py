"""The capture ledger: every model call of an episode with its tokens, as training needs them, and generation cuts."""
