"""Activations and gated activations, also when they quantise their result."""
