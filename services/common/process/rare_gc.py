"""Imported first by processes with torch: its import makes half a million objects, none of them
garbage, and to search them for some would take a tenth of the start.
"""

from services.common.process.process_memory import search_rarely

search_rarely()
