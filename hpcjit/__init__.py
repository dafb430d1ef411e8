"""CUDA kernels for LLM inference, compiled at first call and cached. Importing this loads no torch."""

__version__ = "0.1.0"
