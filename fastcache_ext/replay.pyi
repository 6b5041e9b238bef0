from collections.abc import Sequence
from typing import Any, Self

class Replay:
    def __new__(
        cls,
        layers: Sequence[int],
        cls_of: bytes,
        class_slots: Sequence[int],
        payload: Sequence[int],
        policy: str,
        policies: Sequence[str],
        by_hand: bool,
        slabs: tuple[int, Sequence[int], Sequence[int], Sequence[int], Sequence[int]] | None = None,
    ) -> Self: ...
    def run(self, records: Any) -> tuple[str, int, int]: ...
    def rows(self) -> list[list[int]]: ...
    def layers(self) -> list[dict[str, int]]: ...
