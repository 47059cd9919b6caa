"""Kernels in Triton, Gluon and cuBLASLt, with reference implementations and tuned constants.

Kernels take tensors and plain values. This package imports only torch, Triton and numpy. The
services' operations (`services/decoder/operations`, `services/encoder/operations`) bind layers to
kernels and have the dispatch tables, whose groups are the folders here. Modules that import Triton
are not imported before a table makes their kernels, and all other modules run without Triton.
"""
