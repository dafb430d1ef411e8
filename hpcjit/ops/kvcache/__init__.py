"""Contents of the KV cache: write, copy, quantise, transfer."""
