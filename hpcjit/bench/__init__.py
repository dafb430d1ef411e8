"""Benchmarks: check a result, time it cold and hot in CUDA graphs, compare with peers, the ceiling and targets."""
