"""Checks that a KV cache still holds what was written to it."""
