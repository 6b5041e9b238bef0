from typing import Any

from fastcache_ext.lender import Lender

class Guesser(Lender):
    def _limit_guesses(self, nbytes: int, reads: int, align: int, heeded: bool) -> None: ...
    def _speculation(self) -> dict[str, Any]: ...
