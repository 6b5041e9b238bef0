from typing import Any

from fastcache_ext.lender import Lender

class Guesser(Lender):
    def _speculation(self) -> dict[str, Any]: ...
