"""Sampling kernels, their reference implementations and their inputs.

A sampled token id below zero means that the sequence fails, while other sequences of the batch go
on. The two ids are defined here because the engine, which reads them, does not import torch.
"""

NOT_FINITE = -1  # the logits of the row were not finite
ALL_MASKED = -2  # a token mask, or a logit bias of minus infinity, has left no token
