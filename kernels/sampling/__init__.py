"""Sampling: kernels, their plain twins and what they read.

The two ids are the contract with the engine, which imports no torch: a token id below zero says
that the sequence fails, and its batch-mates do not.
"""

NOT_FINITE = -1  # its logits were not finite
ALL_MASKED = -2  # its token mask, or a logit bias of minus infinity, left no token
