from collections.abc import Sequence
from typing import Any

from fastcache_ext.files import FileSet

class Core:
    engine_used: str
    engine_reason: str
    def _open(
        self,
        *,
        layers: Sequence[tuple[int, int]],
        cls_of: Any,
        ext_first: Any,
        extents: Any,
        span: Any,
        files: FileSet | None,
        class_bytes: Sequence[int],
        class_slots: Sequence[int],
        policy: str,
        engine: str,
        chunk: int,
        queue_depth: int,
        io_threads: int,
        hugepages: str,
        mlock: bool,
        registered: bool,
        overflow: int,
        direct_required: bool,
        slot_align: int = 4096,
        speculation: str = "auto",
        ghosts: bool = False,
        choosing: bool = False,
        sums: tuple[Any, Any, Any, Any] | None = None,
        slabs: tuple[int, Sequence[int], Sequence[int], Sequence[int], Sequence[int]] | None = None,
    ) -> None: ...
    def _sums(self) -> bytes: ...
    def _shut(self, timeout_ns: int) -> bool: ...
    def _same_process(self) -> None: ...
    def _key(self, layer: Any, expert: Any) -> int: ...
    def _pair(self, layer: Any, expert: Any) -> tuple[Any, Any]: ...
    def _where(self, key: int) -> tuple[int, int]: ...
    def _is_resident(self, layer: Any, expert: Any) -> bool: ...
    def _memory(self) -> dict[str, Any]: ...
    def _forked(self) -> bool: ...
