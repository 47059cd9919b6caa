"""An engine that hangs does not read as its last state."""

from types import SimpleNamespace
from typing import cast

from prometheus_client import CollectorRegistry, generate_latest

from services.common.process.engine_process import EngineProcess
from services.decoder.engine.messages import DraftTotals, EngineStats
from services.decoder.metrics import MAX_SILENCE_S, DecoderMetrics


def test_drafts_are_exported_under_own_names_and_vllms() -> None:
    registry = CollectorRegistry()
    metrics = DecoderMetrics(registry)
    metrics.model_name = "tiny"
    value, name = registry.get_sample_value, {"model_name": "tiny"}
    assert value("triptych_decoder_drafted_tokens_total") == 0
    drafts = DraftTotals(3, 7, 4, [3, 1])
    metrics.engine_step(EngineStats(0, 0, 1, 1, 0, 0, 0, 0, drafts=drafts), 0)
    for own, twin, expected in (
        ("draft_verifications", "num_drafts", 3),
        ("drafted_tokens", "num_draft_tokens", 7),
        ("accepted_drafts", "num_accepted_tokens", 4),
    ):
        assert value(f"triptych_decoder_{own}_total") == expected
        assert value(f"vllm:spec_decode_{twin}_total", name) == expected
    for place, count in (("0", 3), ("1", 1)):
        at = {"position": place}
        assert value("triptych_decoder_accepted_drafts_at_total", at) == count
        assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", name | at) == count


def test_gauges_of_a_silent_engine_are_left_out_until_it_speaks() -> None:
    registry = CollectorRegistry()
    metrics = DecoderMetrics(registry)
    metrics.num_rows = 4
    engine = SimpleNamespace(silence_s=1.0)
    metrics.engine = cast("EngineProcess", engine)
    stats = EngineStats(3, 5, 25, 100, 0, 0, 0, 0, num_lacking_images=2, busy_s=1.5)
    stats.num_turns, stats.turn_wait_s = 7, 0.5
    metrics.engine_step(stats, 0)
    value = registry.get_sample_value
    assert value("triptych_decoder_kv_usage_ratio") == 0.75
    assert value("triptych_decoder_row_usage_ratio") == 0.75
    assert value("triptych_decoder_sequences_waiting", {"for": "image"}) == 2
    assert value("triptych_decoder_sequences_waiting", {"for": "engine"}) == 3
    assert value("triptych_decoder_busy_seconds_total") == 1.5
    assert value("triptych_decoder_gpu_turns_total") == 7
    assert value("triptych_decoder_gpu_turn_wait_seconds_total") == 0.5
    engine.silence_s = MAX_SILENCE_S + 1
    text = generate_latest(registry).decode()
    assert "decoder_kv_" not in text and "triptych_decoder_sequences_running" not in text
    assert value("triptych_decoder_engine_silence_seconds") == MAX_SILENCE_S + 1
    assert value("triptych_decoder_busy_seconds_total") == 1.5  # a counter's rate is 0 by itself
    engine.silence_s = 0.0
    assert value("triptych_decoder_kv_usage_ratio") == 0.75
