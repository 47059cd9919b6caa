"""What the engine process does before it loads a model."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from services.encoder.engine_main import prepare_device
from services.encoder.settings import EncoderSettings

CPU = torch.device("cpu")


def test_on_a_cpu_images_have_lower_priority_and_what_they_start_has_too() -> None:
    settings = EncoderSettings(
        model=Path("model"), device="cpu", num_threads=torch.get_num_threads()
    )
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def prepared() -> list[int]:
        prepare_device(CPU, settings)
        with ThreadPoolExecutor(1) as threads:
            return [niceness(), threads.submit(niceness).result()]

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with ThreadPoolExecutor(1) as threads:  # the limits are a thread's
        assert threads.submit(prepared).result() == [min(19, own + 5)] * 2
