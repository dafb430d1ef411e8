"""Embedding look-ups and position embeddings."""
