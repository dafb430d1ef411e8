"""Mixture of experts: routing, permutation and the expert products."""
