"""Kernels of low-rank adapters, which add their changes to the output of a linear layer."""
