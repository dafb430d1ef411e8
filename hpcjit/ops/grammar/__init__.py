"""Token masks of constrained decoding."""
