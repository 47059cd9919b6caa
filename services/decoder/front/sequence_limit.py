"""The number of sequences that a decoder's front accepts at once."""

from services.decoder.engine.messages import EngineInfo

# Number of sequences that may wait for a row, as a multiple of the engine's number of rows.
_QUEUE_FACTOR = 3
# An engine on a CPU has few rows by default. Its front accepts as many sequences as if there were
# this many rows.
_LEAST_ROWS_ON_CPU = 256


def max_sequences(engine: EngineInfo) -> int:
    """Returns the number of sequences that the front accepts at once."""
    rows = engine.max_num_sequences
    if not engine.on_gpu:
        rows = max(rows, _LEAST_ROWS_ON_CPU)
    return (1 + _QUEUE_FACTOR) * rows
