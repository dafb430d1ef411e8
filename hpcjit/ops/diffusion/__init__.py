"""Fusions of diffusion transformers: gates, shifts and modulated norms."""
