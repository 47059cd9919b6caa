"""Reduces garbage collection during the import of torch, and so is imported before torch.

That import creates half a million objects, none of which is garbage. Searching them for cycles
would take a tenth of the start.
"""

from services.common.process.process_memory import search_rarely

search_rarely()
