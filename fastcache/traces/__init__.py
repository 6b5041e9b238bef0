"""Routing traces: one format, importers, replay with the store's own policies, miss-ratio curves, advice about budgets.

Imports errors, keys, units, outputs, budget, layout, what opens a store, NumPy and, of the compiled half, the policies'
names, the simulator and the files.
"""

from fastcache.traces.exact import ExactReplay, replay_exact
from fastcache.traces.format import read_trace, write_trace
from fastcache.traces.importers import read
from fastcache.traces.trace import Trace

__all__ = ["ExactReplay", "Trace", "read", "read_trace", "replay_exact", "write_trace"]
