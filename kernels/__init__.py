"""The kernels: Triton, Gluon and cuBLASLt, with their plain twins and tuned constants.

They take tensors and plain values and import torch, Triton, numpy and each other alone. A service's
operations (`services/decoder/operations`, `services/encoder/operations`) bind layers to them and
have the dispatch tables, whose groups are the folders here. Modules that import Triton are imported
when a table makes their kernel, so that all else runs without it.
"""
