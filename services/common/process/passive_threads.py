"""Lets torch's threads on the CPU block while they wait, on a machine with a GPU.

The module sets `OMP_WAIT_POLICY`, and has to be imported before torch, which reads that variable
once. By default, a thread that waits for the others of an operation spins. While an engine with a
GPU is loaded, torch divides each copy of a tensor among the threads. On a busy machine, threads
that have finished spin on the CPUs that the last thread needs. A copy of 3 MB took 18 to 56 ms on
two busy CPUs, and 0.4 to 1.8 ms with threads that block.

Models that run on the CPU divide many operations of microseconds, which spinning makes faster.
"""

from pathlib import Path

from services.common.settings import let_omp_threads_block

_DRIVER = Path("/dev/nvidiactl")

if _DRIVER.exists():
    let_omp_threads_block()
