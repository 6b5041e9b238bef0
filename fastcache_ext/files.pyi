from collections.abc import Sequence
from typing import Literal, TypedDict

from typing_extensions import Buffer

class _Row(TypedDict):
    path: str | None
    size: int
    align: int
    filesystem: str | None
    direct: bool
    reason: str

class FileSet:
    paths: list[str | None]
    reasons: list[str]
    def __new__(
        cls,
        paths: Sequence[str | None],
        direct: Literal["auto", "require", "off"] = "auto",
        memory: Sequence[Buffer | None] | None = None,
    ) -> FileSet: ...
    @property
    def align(self) -> int: ...
    @property
    def direct_count(self) -> int: ...
    def __len__(self) -> int: ...
    def describe(self) -> list[_Row]: ...
    def close(self) -> None: ...
