"""Rotary position embedding, with the frequencies that a checkpoint's config asks for.

Owns `rope_of`, `Rope` and how a config spells them: `rope_parameters` (transformers 5) or `rope_theta` and
`rope_scaling` (4, and the hub). Knows no weights and no cache. Imports errors, layout.families (config spellings) and
values.

Sources: Su et al., "RoFormer" (arXiv:2104.09864); Peng et al., "YaRN" (arXiv:2309.00071); transformers,
`modeling_rope_utils.py`, whose float32 steps are kept in their order: at position 100,000 the last bit of a frequency
is worth 0.004 radian, so that exact arithmetic would not give what these models give elsewhere.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.families import config_value
from fastcache.moe.values import truth

F32: TypeAlias = NDArray[np.float32]
Config: TypeAlias = Mapping[str, Any]

_LARGEST: Final = float(np.finfo(np.float32).max)
_MAX_POSITION: Final = 1 << 24  # beyond it float32 has no longer every position


class Rope:
    """Rotates queries and keys by their positions. Made by `rope_of`.

    Attributes
    ----------
    inv_freq : ndarray, float32, [rotary / 2]
        Radians per position of each pair.
    attention_scale : float
        Times cos and sin, so once in a query and once in a key (YaRN's "mscale").
    interleaved : bool
        Pairs are neighbours (2i, 2i + 1), else (i, i + rotary / 2).
    limit : int or None
        Positions from here on are refused (dynamic NTK).

    Notes
    -----
    Safe to call from any number of threads. Keeps the cosines and sines of the last call, 4 * T * rotary bytes: all
    layers of a step ask for the same, and so have one rope, as long as any of them lives.
    """

    _alive: ClassVar[weakref.WeakValueDictionary[Any, Rope]] = weakref.WeakValueDictionary()

    def __init__(
        self, inv_freq: F32, *, attention_scale: float = 1.0, interleaved: bool = False, limit: int | None = None
    ) -> None:
        self.inv_freq, self.attention_scale = inv_freq, attention_scale
        self.interleaved, self.limit = interleaved, limit
        self._last: tuple[int, F32, F32] = (0, np.empty((0, len(inv_freq)), np.float32), np.empty(0, np.float32))

    @classmethod
    def of(
        cls, inv_freq: F32, *, attention_scale: float = 1.0, interleaved: bool = False, limit: int | None = None
    ) -> Rope:
        """Return the one rope of such parameters."""
        made = cls(inv_freq, attention_scale=attention_scale, interleaved=interleaved, limit=limit)
        return cls._alive.setdefault((inv_freq.tobytes(), attention_scale, interleaved, limit), made)

    def rotate(self, x: F32, start: int) -> F32:
        """Rotate rows that are at positions start, start + 1, ...

        Parameters
        ----------
        x : ndarray, float32, [T, heads, dim]
            What is behind the first `2 * len(inv_freq)` of a head is passed through.
        start : int

        Returns
        -------
        ndarray, float32, [T, heads, dim]
            New memory.

        Raises
        ------
        ValueError
            A position is at or beyond `limit`, or where float32 no longer tells positions apart (2**24).
        """
        cos, sin = self._tables(start, len(x))
        half = len(self.inv_freq)
        out = np.empty(x.shape, np.float32)
        if self.interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:
            first, second = slice(0, half), slice(half, 2 * half)
        a, b = x[..., first], x[..., second]
        out[..., first] = a * cos - b * sin
        out[..., second] = b * cos + a * sin
        out[..., 2 * half :] = x[..., 2 * half :]
        return out

    def _tables(self, start: int, length: int) -> tuple[F32, F32]:
        """Return cos and sin, [T, 1, rotary / 2], scaled."""
        at, cos, sin = self._last  # one read: another thread may replace it meanwhile
        if at == start and len(cos) == length:
            return cos, sin
        end = start + length
        if start < 0 or end > _MAX_POSITION or (self.limit is not None and end > self.limit):
            raise ValueError(
                f"positions {start} to {end - 1}; this model's rope is defined below {self.limit or 1 << 24}"
            )
        # The angle in float32, as the models compute it; its cosine in float64, which no SIMD variant changes.
        angle = (np.arange(start, end, dtype=np.float32)[:, np.newaxis, np.newaxis] * self.inv_freq).astype(np.float64)
        scale = np.float32(self.attention_scale)
        cos, sin = np.cos(angle).astype(np.float32) * scale, np.sin(angle).astype(np.float32) * scale
        self._last = (start, cos, sin)
        return cos, sin


def rope_of(
    config: Config,
    dim: int,
    layer_type: str | None = None,
    *,
    interleaved: bool | None = None,
    partial: float = 1.0,
) -> Rope:
    """Return the rope of a config.

    Parameters
    ----------
    config : mapping
        config.json, or a GGUF file's metadata in its words.
    dim : int
        Width of what is rotated: a head, of which `partial_rotary_factor` is rotated; or MLA's `qk_rope_head_dim`.
    layer_type : str, optional
        "full_attention", "sliding_attention", ...: needed where the config has parameters for each.
    interleaved : bool, optional
        Rotate neighbours. Default: what the config says under `rope_interleave`, as it does of GGUF files of the
        architecture "llama", whose rows were permuted so; else no.
    partial : float
        The part of `dim` that is rotated, where the config has no `partial_rotary_factor`.

    Returns
    -------
    Rope

    Raises
    ------
    UnsupportedCheckpoint
        A kind of rope that is not computed here, or a parameter that is missing or out of its range.

    Notes
    -----
    Kinds: default, linear, dynamic, yarn, llama3. Dynamic NTK changes all frequencies with the length of the text, so
    that keys in a cache would have been rotated by others: it is computed up to `max_position_embeddings`, where it is
    the default, and refused beyond.
    """
    if interleaved is None:
        interleaved = truth(config, "rope_interleave", False)
    parameters = rope_parameters(config, layer_type)
    rotary = int(dim * _number(parameters, "partial_rotary_factor", partial))
    if rotary <= 0 or rotary % 2 or rotary > dim:
        raise UnsupportedCheckpoint(f"config.json: a head of {dim} of which {rotary} are rotated, in pairs")
    theta = _number(parameters, "rope_theta")
    if theta <= 1:
        raise UnsupportedCheckpoint(f"config.json: rope_theta is {theta}; a number above 1 is wanted")
    # float32 exponents, then a power and a quotient that are each rounded once.
    exponents = (np.arange(0, rotary, 2, dtype=np.float32) / np.float32(rotary)).astype(np.float64)
    wavelengths = (np.float64(np.float32(theta)) ** exponents).astype(np.float32)  # over 2 pi
    plain = np.float32(1) / wavelengths
    kind = parameters["rope_type"]
    if kind == "default":
        return Rope.of(plain, interleaved=interleaved)
    if kind == "linear":
        return Rope.of(plain / np.float32(_number(parameters, "factor")), interleaved=interleaved)
    if kind == "dynamic":
        return Rope.of(plain, interleaved=interleaved, limit=_context(config, parameters))
    if kind == "llama3":
        return Rope.of(_llama3(plain, parameters), interleaved=interleaved)
    if kind == "yarn":
        inv_freq = _yarn(
            wavelengths, theta, _original_context(config, parameters), parameters, _factor(config, parameters)
        )
        return Rope.of(inv_freq, attention_scale=_yarn_scale(config, parameters), interleaved=interleaved)
    raise UnsupportedCheckpoint(
        f"config.json: rope of kind {kind!r}; this version computes default, linear, dynamic, yarn and llama3. "
        f"The bytes are served: use fastcache.open and your own forward"
    )


def rope_parameters(config: Config, layer_type: str | None = None) -> Mapping[str, Any]:
    """Return what a config says of its rope in the words of `rope_parameters`, whichever way it is spelled.

    Raises
    ------
    UnsupportedCheckpoint
        It is neither spelling, or has parameters for each type of layer and `layer_type` is none of them.
    """
    found = config_value(config, "rope_parameters")
    if found is None:
        scaling = config_value(config, "rope_scaling")
        found = {**_mapping(scaling or {})}
        theta = config_value(config, "rope_theta")
        if theta is not None:
            found["rope_theta"] = theta
    found = _mapping(found)
    if found and all(isinstance(value, Mapping) for value in found.values()):
        if layer_type is None or layer_type not in found:
            raise UnsupportedCheckpoint(f"config.json: rope_parameters are for {', '.join(found)}, not {layer_type!r}")
        found = _mapping(found[layer_type])
    kind = found.get("type") if found.get("rope_type") is None else found["rope_type"]
    if kind is None:
        if found.get("factor") not in (None, 1):
            raise UnsupportedCheckpoint(f"config.json: a rope with factor {found['factor']!r}, and of no kind")
        kind = "default"
    partial = found.get("partial_rotary_factor", config_value(config, "partial_rotary_factor"))
    return {**found, "rope_type": kind, "partial_rotary_factor": partial}


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's scale of attention for a context stretched `factor` times: 0.1 mscale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(config: Config, head: int) -> float:
    """Return what MLA multiplies its logits with: head ** -0.5, times YaRN's mscale for all dimensions, squared.

    Source: DeepSeek-V2 and V3, `modeling_deepseek.py`. (transformers leaves the square out for V2: no checkpoint of
    DeepSeek's was trained so.)
    """
    scale = 1 / math.sqrt(head)
    parameters = rope_parameters(config)
    all_dim = _number_or_none(parameters, "mscale_all_dim")
    if parameters["rope_type"] == "default" or all_dim is None:
        return scale
    mscale = yarn_mscale(_factor(config, parameters), all_dim)
    return scale * mscale * mscale


def _llama3(plain: F32, parameters: Config) -> F32:
    """Stretch wavelengths above the original context, keep short ones, blend between."""
    factor = np.float32(_number(parameters, "factor"))
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    context = _number(parameters, "original_max_position_embeddings")
    if high <= low:
        raise UnsupportedCheckpoint(f"config.json: high_freq_factor is {high}, low_freq_factor {low}")
    wavelength = np.float32(2 * math.pi) / plain
    stretched = np.where(wavelength > np.float32(context / low), plain / factor, plain)
    smooth = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * stretched / factor + smooth * stretched
    medium = (wavelength >= np.float32(context / high)) & (wavelength <= np.float32(context / low))
    return np.where(medium, blended, stretched).astype(np.float32)


def _yarn(wavelengths: F32, theta: float, context: float, parameters: Config, factor: float) -> F32:
    """Keep frequencies that turn `beta_fast` times within the original context, stretch those below `beta_slow`."""
    rotary = 2 * len(wavelengths)

    def pair_of(turns: float) -> float:
        return rotary * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (pair_of(_number(parameters, key, default)) for key, default in (("beta_fast", 32), ("beta_slow", 1)))
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UnsupportedCheckpoint(f"config.json: truncate of the rope is {truncate!r}, not true or false")
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(len(wavelengths), dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    plain = np.float32(1) / wavelengths
    stretched = np.float32(1) / (np.float32(factor) * wavelengths)
    result: F32 = stretched * (np.float32(1) - kept) + plain * kept
    return result


def _yarn_scale(config: Config, parameters: Config) -> float:
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")
    factor = _factor(config, parameters)
    mscale, all_dim = (_number_or_none(parameters, key) for key in ("mscale", "mscale_all_dim"))
    if mscale is None or all_dim is None:
        return yarn_mscale(factor)
    return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)


def _factor(config: Config, parameters: Config) -> float:
    """How many times the context is stretched; where it is not said, the ratio of the contexts."""
    if parameters.get("factor") is None:
        return _context(config, parameters) / _original_context(config, parameters)
    return _number(parameters, "factor")


def _context(config: Config, parameters: Config) -> int:
    return int(
        _number({"max_position_embeddings": config_value(config, "max_position_embeddings")}, "max_position_embeddings")
    )


def _original_context(config: Config, parameters: Config) -> float:
    if parameters.get("original_max_position_embeddings") is None:
        return _context(config, parameters)
    return _number(parameters, "original_max_position_embeddings")


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UnsupportedCheckpoint(f"config.json: the parameters of its rope are {value!r}, not an object")
    return value


def _number(parameters: Config, key: str, default: float | None = None) -> float:
    """Return a positive number of the parameters, of those that float32 has."""
    value = parameters.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _LARGEST:
        raise UnsupportedCheckpoint(f"config.json: {key} of the rope is {value!r}, not a positive number")
    return float(value)


def _number_or_none(parameters: Config, key: str) -> float | None:
    """Return a positive number of the parameters; None where it is absent, null or 0, which ask for nothing."""
    value = parameters.get(key)
    return None if value is None or (value == 0 and not isinstance(value, bool)) else _number(parameters, key)
