"""Progress of a service's start, as log records that the program which started it can show.

A record at INFO has the fields `stage`, `done` and `total`. A stage is something that people wait
for: weights, kernels, graphs. Loaders and runners call `log_progress` as often as they like.
"""

import logging
import time

_PERIOD_S = 0.5

log = logging.getLogger(__name__)
_last = ("", 0.0)


def log_progress(stage: str, done: int = 0, total: int = 0) -> None:
    """Logs a stage when it begins and when it ends, and at most twice a second in between.

    Args:
        stage: name of the stage.
        done: number of units of work that are done.
        total: number of all units of work. 0 if it is not known.
    """
    global _last
    now = time.monotonic()
    is_end = 0 < total <= done
    if stage == _last[0] and not is_end and now - _last[1] < _PERIOD_S:
        return
    _last = (stage, now)
    fields = {"stage": stage, "done": done, "total": total}
    log.info("%s", stage, extra={"fields": fields})
