"""Programmatic dependent launch: a kernel starts while the one before it on the stream ends.

A kernel launched so calls `gdc_wait` before it touches what an earlier kernel writes; that returns
when the kernel before has ended, which by then had waited for all before it. With
`gdc_launch_dependents` at its own start a kernel lets the next one start as soon as all of its own
programs run, so that a step of some hundred short kernels has fewer gaps. Hopper and later have it.

Two kernels that do not need each other run side by side so: the first lets the second start only
after its own `gdc_wait`, when what both read is there, and one program of the second calls
`gdc_wait`, at its end instead of its start, so that whoever waits for it has waited for both.
"""

import functools

import torch


@functools.cache
def overlaps() -> bool:
    """Whether the device of this process can."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
