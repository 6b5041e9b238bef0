"""A user's own model families.

Owns the public `register_family`. Knows no row. Imports layout.families; moe when a forward is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastcache.layout import families

if TYPE_CHECKING:
    from fastcache.moe.families import Forward


def register_family(family: families.Family, forward: Forward | None = None) -> None:
    """Teach this process a model family: where its experts are, and optionally how its MoE block computes.

    Parameters
    ----------
    family : Family
        The row; those of the families known here are in `fastcache/layout/families.py`. It wins over any other for its
        `model_types` and its `gguf` architectures, and replaces a row of the same name.
    forward : fastcache.moe.Forward, optional
        What `fastcache.moe.load_block` computes with; see `fastcache/moe/families.py`. Without one the bytes are
        served and the forward is not available, unless one is known under that name.

    Raises
    ------
    TypeError
        A Family or a Forward is wanted and something else is given.
    ValueError
        The row has no name, or the fallback's; or no role is known of any of its tensors.

    Notes
    -----
    For checkpoints opened from now on. Call it before other threads open any. Without a row, tensors under
    "layers.N. ... .experts." are served by their stored names.

    Examples
    --------
    Experts under "layers.N.ffn.experts.E.{a,b,c}.weight":

    >>> import fastcache
    >>> fastcache.register_family(
    ...     fastcache.Family("my_moe", ("my_moe",), block="ffn.experts", roles={"a": "gate", "b": "up", "c": "down"})
    ... )
    """
    if forward is not None:
        from fastcache.moe.families import Forward, register_forward

        if not isinstance(forward, Forward):
            raise TypeError(f"a forward is a fastcache.moe.Forward(...), not {forward!r}")
    families.register_family(family)
    if forward is not None:
        register_forward(family.name, forward)
