"""Triton kernels; imported only when one is launched."""
