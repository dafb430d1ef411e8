"""Collectives, and whatever is fused with them."""
