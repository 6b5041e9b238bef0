"""config.json's `quantization_config` -> by which schemes a stored tensor of codes may be coded.

Owns the spellings of the producers: the `fp8` of DeepSeek and transformers, compressed-tensors, gpt-oss's `mxfp4`,
`gptq` and `awq`. What is not known is a scheme with a problem that names the key. Sources: transformers `quantizers/`,
compressed-tensors `quantization/quant_args.py` and `config/format.py`, GPTQModel `quantization/config.py`, AutoAWQ
`models/_config.py`. Imports numpy, formats.scheme, layout.families (for config keys).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from fastcache.formats.dtypes import SELF_CONTAINED
from fastcache.formats.scheme import Scheme, carrier
from fastcache.layout.families import config_value

_KEY: Final = "quantization_config"
_FP8: Final = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_SCALED: Final = ("fp8", "fbgemm_fp8", "mxfp4")  # quant_method; per-tensor and per-channel scales say so by shape
_MODELOPT: Final = ("modelopt", "modelopt_fp4")  # of NVFP4 the types say it all: groups of 16
_FOUR_BIT_FLOAT: Final = re.compile("FP4|MIXED_PRECISION", re.IGNORECASE)  # ModelOpt's bytes of two integers are others
_FORMATS: Final = (
    "float-quantized",
    "naive-quantized",
    "int-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)


class Quantization:
    """What a checkpoint's config says of its codes.

    Parameters
    ----------
    config : mapping
        config.json; of GGUF anything, its types say it all.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        found = config_value(config, _KEY, "compression_config")
        self._config: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        self._known: dict[str, tuple[Scheme, ...]] = {}

    def carrier(self, stored: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return `dtype`, of an array over a tensor stored as `stored` ("F8_E4M3", "I32", ...), with its schemes."""
        if stored in SELF_CONTAINED:
            return dtype
        if stored not in self._known:
            self._known[stored] = self._schemes(stored)
        return carrier(dtype, self._known[stored])

    def _schemes(self, stored: str) -> tuple[Scheme, ...]:
        config = self._config
        method = config.get("quant_method")
        if not config or method == "mxfp4":
            return ()
        if method == "compressed-tensors" or (method is None and "config_groups" in config):
            return self._compressed(stored)
        if method in _SCALED or (method in _MODELOPT and stored in (*_FP8, "U8")):
            algorithm = config.get("quant_algo")
            if stored == "U8" and isinstance(algorithm, str) and not _FOUR_BIT_FLOAT.search(algorithm):
                return (_refused("quant_algo", algorithm),)
            block = config.get("weight_block_size")
            if block is None:
                return ()
            pair = _pair(block)
            if pair is None:
                return (_refused("weight_block_size", block),)
            return (Scheme(block=pair),)
        if method in ("gptq", "awq") and stored == "I32":
            return ((_gptq if method == "gptq" else _awq)(config),)
        return (_refused("quant_method", method),)

    @property
    def needs(self) -> tuple[tuple[str, str], ...]:
        """Ends of names, and what must be there beside a tensor whose name ends so."""
        ordered = self._config.get("quant_method") == "gptq" and self._config.get("desc_act") is True
        return (("qweight", "g_idx"),) if ordered else ()

    def _compressed(self, stored: str) -> tuple[Scheme, ...]:
        config = self._config
        if config.get("transform_config"):
            return (_refused("transform_config", config["transform_config"]),)
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping):
            return (_refused("config_groups", groups),)
        schemes: dict[Scheme, None] = {}  # in order, each once
        for name, group in groups.items():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping):
                continue
            packing = group.get("format") or config.get("format")
            if packing is not None and packing not in _FORMATS:
                schemes[_refused("format", packing)] = None
            elif _fits(stored, weights):
                schemes[_scheme(f"config_groups.{name}.weights", weights)] = None
        return tuple(schemes)


def _fits(stored: str, weights: Mapping[str, Any]) -> bool:
    """Say whether tensors of this stored type can be the codes of such weights."""
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if kind == "float":
        return (stored in _FP8 and bits == 8) or (stored == "U8" and bits == 4)
    return stored == "I32" or (stored == "I8" and bits == 8)


def _scheme(where: str, weights: Mapping[str, Any]) -> Scheme:
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    blocks = {"tensor": (0, 0), "channel": (1, 0)}
    block = blocks.get(strategy)
    if strategy in ("group", "tensor_group"):
        block = (1, size) if isinstance(size, int) and size > 0 else None
    elif strategy == "block":
        block = _pair(weights.get("block_structure"))
    if block is None:
        return _refused(f"{where}.strategy", strategy)
    bits = weights.get("num_bits", 8)
    asymmetric = weights.get("symmetric") is False
    return Scheme(block, bits if isinstance(bits, int) else 0, asymmetric)


def _gptq(config: Mapping[str, Any]) -> Scheme:
    """One scheme for all modules: the shapes tell of those that `dynamic` gives other bits or groups."""
    packing = config.get("checkpoint_format") or config.get("format") or "gptq"
    if config.get("is_marlin_format"):
        return _refused("is_marlin_format", True)
    if packing not in ("gptq", "gptq_v2"):
        return _refused("checkpoint_format", packing)
    if str(config.get("pack_dtype") or "int32").removeprefix("torch.") != "int32":
        return _refused("pack_dtype", config["pack_dtype"])
    bits, size = config.get("bits"), config.get("group_size", -1)
    if bits not in (2, 4, 8):
        return _refused("bits", bits)
    if not _is_group(size):
        return _refused("group_size", size)
    meta = config.get("meta")
    maker = meta.get("quantizer") if isinstance(meta, Mapping) else None
    makers = maker if isinstance(maker, list) else [maker]
    carries = any(isinstance(each, str) and each.startswith("gptqmodel") for each in makers)
    own = bool(config.get("dynamic"))
    return Scheme(
        None if own else (1, max(size, 0)),
        0 if own else bits,
        asymmetric=config.get("sym") is False,
        packing=packing,
        ordered=config.get("desc_act") is True,
        carries=carries,
    )


def _awq(config: Mapping[str, Any]) -> Scheme:
    version = config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm"
    if str(version).lower() != "gemm":
        return _refused("version", version)
    bits, size = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size", 128))
    if bits != 4:
        return _refused("bits", bits)
    if not _is_group(size):
        return _refused("group_size", size)
    return Scheme((1, max(size, 0)), 4, packing="awq")


def _is_group(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and (size == -1 or size > 0)


def _pair(value: Any) -> tuple[int, int] | None:
    """Two positive integers, or "128x128" as older files have it."""
    if isinstance(value, str) and re.fullmatch(r"\d+x\d+", value):
        value = [int(part) for part in value.split("x")]
    if not isinstance(value, list) or len(value) != 2:
        return None
    if any(isinstance(each, bool) or not isinstance(each, int) or each <= 0 for each in value):
        return None
    return value[0], value[1]


def _refused(key: str, value: Any) -> Scheme:
    return Scheme(problem=f"{_KEY}.{key} is {value!r:.60}")
