"""An engine that hangs does not read as its last state."""

from types import SimpleNamespace
from typing import cast

from prometheus_client import CollectorRegistry, generate_latest

from services.common.process.engine_process import EngineProcess
from services.decoder.engine.messages import EngineStats
from services.decoder.metrics import MAX_SILENCE_S, DecoderMetrics


def test_gauges_of_a_silent_engine_are_left_out_until_it_speaks() -> None:
    registry = CollectorRegistry()
    metrics = DecoderMetrics(registry)
    metrics.num_rows = 4
    engine = SimpleNamespace(silence_s=1.0)
    metrics.engine = cast("EngineProcess", engine)
    stats = EngineStats(3, 5, 25, 100, 0, 0, 0, 0, num_lacking_images=2, busy_s=1.5)
    metrics.engine_step(stats, 0)
    value = registry.get_sample_value
    assert value("triptych_decoder_kv_usage_ratio") == 0.75
    assert value("triptych_decoder_row_usage_ratio") == 0.75
    assert value("triptych_decoder_sequences_waiting", {"for": "image"}) == 2
    assert value("triptych_decoder_sequences_waiting", {"for": "engine"}) == 3
    assert value("triptych_decoder_busy_seconds_total") == 1.5
    engine.silence_s = MAX_SILENCE_S + 1
    text = generate_latest(registry).decode()
    assert "decoder_kv_" not in text and "triptych_decoder_sequences_running" not in text
    assert value("triptych_decoder_engine_silence_seconds") == MAX_SILENCE_S + 1
    assert value("triptych_decoder_busy_seconds_total") == 1.5  # a counter's rate is 0 by itself
    engine.silence_s = 0.0
    assert value("triptych_decoder_kv_usage_ratio") == 0.75
