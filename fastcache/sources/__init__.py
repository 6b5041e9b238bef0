"""Where experts' bytes come from, when it is not (only) a checkpoint: a protocol, and sources over files and memory.

`CheckpointSource` is in `fastcache.sources.checkpoint`: it alone needs the layout.
"""

from fastcache.sources.base import ExpertSource, Extent, ExtentSource, ReadSource
from fastcache.sources.files import FileRangeSource
from fastcache.sources.memory import MemorySource

__all__ = ["ExpertSource", "Extent", "ExtentSource", "FileRangeSource", "MemorySource", "ReadSource"]
