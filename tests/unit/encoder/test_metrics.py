"""Counters of the engine become increments of the front's metrics."""

import pytest

from services.encoder.engine.messages import EngineStats
from services.encoder.metrics import EncoderMetrics


def test_kernel_calls_are_counted_by_operation_and_implementation() -> None:
    metrics = EncoderMetrics()
    metrics.observe_batch(EngineStats(1, 64, {"rotary=triton": 24}, 0.25))
    metrics.observe_batch(
        EngineStats(3, 192, {"rotary=triton": 48, "rotary=plain": 5}, 1.0, 2, 0.5)
    )
    # Batches of 64 and 128 patches in 0.25 and 0.75 s; the first counts for nine tenths by now.
    assert metrics.patch_s == pytest.approx((0.9 * 0.25 + 0.75) / (0.9 * 64 + 128))

    def value(implementation: str) -> float | None:
        labels = {"operation": "rotary", "implementation": implementation}
        return metrics.registry.get_sample_value("triptych_encoder_kernel_calls_total", labels)

    assert value("triton") == 48 and value("plain") == 5
    assert metrics.registry.get_sample_value("triptych_encoder_batch_patches_sum") == 192
    assert metrics.registry.get_sample_value("triptych_encoder_patches_encoded_total") == 192
    assert metrics.registry.get_sample_value("triptych_encoder_busy_seconds_total") == 1.0
    assert metrics.registry.get_sample_value("triptych_encoder_gpu_turns_total") == 2
    assert metrics.registry.get_sample_value("triptych_encoder_gpu_turn_wait_seconds_total") == 0.5
