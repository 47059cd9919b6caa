"""What the engine process does before it loads a model."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from services.encoder.engine_main import prepare_device
from services.encoder.settings import EncoderSettings
from tests.slices import slice_ns

CPU = torch.device("cpu")


def test_on_a_cpu_images_give_way_and_what_they_start_does_too() -> None:
    settings = EncoderSettings(
        model=Path("model"), device="cpu", num_threads=torch.get_num_threads()
    )
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def prepared() -> list[tuple[int, int]]:
        prepare_device(CPU, settings)
        with ThreadPoolExecutor(1) as threads:
            return [found(), threads.submit(found).result()]

    def found() -> tuple[int, int]:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), slice_ns()

    with ThreadPoolExecutor(1) as threads:  # the limits are a thread's
        for niceness, slice_of_thread in threads.submit(prepared).result():
            assert niceness == min(19, own + 5)
            assert slice_of_thread > 10 * slice_ns()  # what wakes up goes first
