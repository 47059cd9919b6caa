"""Imported first by processes with torch. Its import makes half a million objects, none of them
garbage: searches for some would take a tenth of the start. `freeze_gc` leaves it so.
"""

import gc

gc.set_threshold(20_000, 20, 50)
