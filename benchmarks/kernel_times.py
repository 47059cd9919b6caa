"""Times of the device's kernels, from torch's profiler, also within CUDA graphs."""

from typing import Any

import torch

_NAME_LENGTH = 56


class KernelTimes:
    """A context in which the device's kernels are timed. On a CPU, operations of torch are timed.

    Kernels take up to a few microseconds longer than without the profiler, and launches on the host
    take longer, too.
    """

    def __init__(self) -> None:
        on_gpu = torch.cuda.is_available()
        self._device = "CUDA" if on_gpu else "CPU"
        kinds = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(activities=[kinds.CUDA if on_gpu else kinds.CPU])

    def __enter__(self) -> "KernelTimes":
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401 - given to the profiler
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.__exit__(*error)

    def print(self, title: str, num_steps: int, num_lines: int = 16) -> None:
        """Prints the milliseconds of a step.

        Args:
            title: beginning of the first line.
            num_steps: number of steps that were run in the context.
            num_lines: number of kernels to name, those that have taken most time.
        """
        found = [event for event in self._profile.events() or () if self._is_timed(event)]
        spans = sorted((event.time_range.start, event.time_range.end) for event in found)
        busy = idle = 0.0
        end = spans[0][0] if spans else 0.0
        for start, stop in spans:
            idle += max(0.0, start - end)
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        times = f"{1e-3 * busy / num_steps:.3f} busy, {1e-3 * idle / num_steps:.3f} idle"
        print(f"{title} {num_steps} steps, ms of each: {times}", flush=True)
        groups: dict[str, tuple[float, int]] = {}
        for event in found:
            name = event.name.removeprefix("void ").split("(")[0].split("<")[0][-_NAME_LENGTH:]
            total, count = groups.get(name, (0.0, 0))
            groups[name] = total + event.time_range.elapsed_us(), count + 1
        largest = sorted(groups.items(), key=lambda item: -item[1][0])
        for name, (us, count) in largest[:num_lines]:
            each = f"{count / num_steps:6.1f} x {us / count:7.1f} us"
            print(f"  {1e-3 * us / num_steps:7.3f} ms {each}  {name}", flush=True)

    def _is_timed(self, event: Any) -> bool:  # noqa: ANN401 - the profiler's
        return event.device_type.name == self._device and not event.name.startswith("ProfilerStep")
