"""Routing traces: one format, importers, replay with the store's own policies, miss-ratio curves, advice about budgets.

Imports errors, keys, units, budget, layout, NumPy and, of the compiled half, the policies' names and the simulator.
"""

from fastcache.traces.format import read_trace, write_trace
from fastcache.traces.importers import read
from fastcache.traces.trace import Trace

__all__ = ["Trace", "read", "read_trace", "write_trace"]
