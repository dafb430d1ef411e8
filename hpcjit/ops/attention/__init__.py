"""Attention, and the rotary embedding and query-key norms fused with it."""
