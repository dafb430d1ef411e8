"""State-space models: causal convolution, scan and state update."""
