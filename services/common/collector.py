"""Python's garbage collector in a process that serves for long."""

import gc


def settle_collector() -> None:
    """Called once all that lives for ever has been made, before the first request.

    A model's modules or a tokenizer's tables are many objects that never become garbage: without
    this, every full collection walks them all, tens of milliseconds in which nobody is answered.
    Reference counts free nearly everything here, so cycles may wait longer, too.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
