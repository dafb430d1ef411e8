"""RMSNorm and LayerNorm, also with a residual added or the result quantised."""
