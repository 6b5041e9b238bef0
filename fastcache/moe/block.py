"""One MoE block in NumPy, its routed experts from a store or from memory.

Owns `MoEBlock` and `load_block`. Knows no file format and no store: experts come from anything with `as_ready`.
Imports errors, layout, and the rest of moe.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Set
from contextlib import closing
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcache.errors import UnsupportedCheckpoint
from fastcache.layout.build import build_layout
from fastcache.layout.record import Layout, Record
from fastcache.linear import linear
from fastcache.moe.arrival import Experts, arriving
from fastcache.moe.experts import check_biases, check_shapes
from fastcache.moe.families import Ffn, Forward, forward_of, top_k_of
from fastcache.moe.gate import Gate
from fastcache.moe.latent import LatentSpace, load_latent
from fastcache.moe.resident import ResidentExperts, layer_experts
from fastcache.moe.routers import Routing, sigmoid
from fastcache.moe.rules import takes_biases
from fastcache.moe.speculator import Speculator
from fastcache.moe.tensors import labelled
from fastcache.moe.trunk import layer_tensor, weight_name
from fastcache.moe.weights import finite
from fastcache.quant.decodable import check_decodable, hollow
from fastcache.quant.floats import is_plain, to_float32

F32: TypeAlias = NDArray[np.float32]
_MOE_NAME = re.compile(r"ffn_gate_inp|exp_probs|ffn_.*(_shexp|exps|_latent)")  # GGUF's, after "blk.L."


class MoEBlock:
    """The MoE part of one decoder layer: router, routed experts, shared expert. Made by `load_block`.

    Attributes
    ----------
    layer : int
    family : str
    n_experts, top_k, hidden : int
        E, k and H below.
    names : frozenset of str
        What it has of the layer's tensors besides routed experts, by their names after the layer's.
    experts : object with as_ready
        Where the routed experts' arrays come from; may be replaced at any time.
    speculator : Speculator or None
        What reads the next layers' experts ahead; may be replaced at any time.

    Notes
    -----
    Calling a block from several threads is safe if `experts` is.
    """

    def __init__(
        self,
        *,
        layer: int,
        family: str,
        top_k: int,
        experts: Experts,
        gate: Gate,
        ffn: Ffn,
        shared: Mapping[str, NDArray[Any]] | None,
        shared_gate: F32 | None,
        speculator: Speculator | None = None,
        weighs_input: bool = False,
        latent: LatentSpace | None = None,
        names: Set[str] = frozenset(),
    ) -> None:
        self.names = frozenset(names)
        self.layer, self.family, self.top_k, self.experts = layer, family, top_k, experts
        self.n_experts, self.hidden = gate.n_experts, gate.hidden
        self._gate, self._ffn, self._shared = gate, ffn, shared
        self._shared_gate = None if shared_gate is None else {"shared_gate": shared_gate}
        self._weighs_input, self._latent = weighs_input, latent
        self.speculator = speculator
        if speculator is not None:
            speculator.add(layer, gate, top_k)

    def __repr__(self) -> str:
        return f"<MoEBlock {self.family} layer {self.layer}: {self.top_k} of {self.n_experts} experts>"

    def router_logits(self, x: ArrayLike) -> F32:
        """Return the router's raw logits, its own bias included: x [T, H] -> [T, E] float32."""
        return self._gate.logits(self._checked(x))

    def route(self, x: ArrayLike) -> Routing:
        """Return which experts serve each token: x [T, H] -> experts [T, k] int64, weights [T, k] float32."""
        return self._gate.route(self._checked(x))

    def __call__(self, x: ArrayLike) -> F32:
        """Compute the block's output, without the residual.

        Parameters
        ----------
        x : array_like, float32, [T, H]
            What the layer's second norm gives.

        Returns
        -------
        ndarray, float32, [T, H]

        Raises
        ------
        ValueError
            x is not [T, H].
        FastcacheError
            Whatever the store's `as_ready` raises.

        Notes
        -----
        Experts are computed as they arrive, each over all of its tokens at once, and summed afterwards in each
        token's router order: floating point sums depend on order, and arrival is no order. Holds T * k * H floats.
        A store's experts are asked for in its waves: a union above the budget is read once, and into slots.
        """
        x = self._checked(x)
        experts, weights = self.route(x)
        wanted = np.unique(experts).tolist()
        # Asked for first, so that reading goes on while the shared expert is computed.
        with closing(arriving(self.experts, self.layer, wanted)) as ready:
            if self.speculator is not None:  # after what is needed now has its slots
                self.speculator.routed(self.layer, x, experts, self.experts)
            shared = self._shared_output(x)
            given = x if self._latent is None else self._latent.enter(x)
            parts = np.empty((*experts.shape, given.shape[1]), np.float32)
            missing = set(wanted)
            for expert, arrays in ready:
                tokens, places = np.nonzero(experts == expert)
                mine = given[tokens]
                if self._weighs_input:
                    mine *= weights[tokens, places, np.newaxis]
                parts[tokens, places] = self._ffn(mine, arrays)
                missing.remove(expert)
                del arrays  # or its slot stays leased while the next one is waited for
        if missing:
            raise RuntimeError(f"as_ready ended without experts {sorted(missing)} of layer {self.layer}")
        if not self._weighs_input:
            parts *= weights[:, :, np.newaxis]
        y: F32 = parts[:, 0]
        for place in range(1, self.top_k):
            y = y + parts[:, place]
        if self._latent is not None:
            y = self._latent.leave(y)
        return y if shared is None else y + shared

    def _shared_output(self, x: F32) -> F32 | None:
        if self._shared is None:
            return None
        y = self._ffn(x, self._shared)
        if self._shared_gate is not None:
            y *= sigmoid(linear(x, self._shared_gate, "shared_gate"))
        return y

    def _checked(self, x: ArrayLike) -> F32:
        array = np.asarray(x, np.float32)
        if array.ndim != 2 or array.shape[1] != self.hidden:
            raise ValueError(f"x has shape {array.shape}; this block takes [T, {self.hidden}]")
        return array


def load_block(
    path: str | os.PathLike[str] | Layout,
    layer: int,
    experts: Experts | Literal["resident"],
    *,
    speculator: Speculator | None = None,
    trunk: Mapping[str, NDArray[Any]] | None = None,
) -> MoEBlock:
    """Load one MoE block of a checkpoint: its router and shared expert into memory, its experts from `experts`.

    Parameters
    ----------
    path : path or Layout
        The checkpoint, as for `fastcache.open`; or its layout, which saves reading the headers once per layer.
    layer : int
        The decoder layer.
    experts : ExpertStore or "resident"
        A store of the same checkpoint (any object with `as_ready`); or "resident": read all experts of the layer
        now and keep them. The outputs are bit-identical.
    speculator : Speculator, optional
        One for all blocks of the model: what the next layers are likely to need is read while this one computes.
        Changes no output.
    trunk : mapping of str to ndarray, optional
        Tensors by on-disk name, such as `store.trunk`: router and shared expert are multiplied as they are there. None:
        they are converted to float32 now.

    Returns
    -------
    MoEBlock

    Raises
    ------
    UnsupportedCheckpoint
        No forward for this family or its settings, or its experts are stored in a way that `fastcache.linear` does not
        decode. `fastcache.open` serves them.
    UnknownExpert
        The layer is dense, or there is no such layer.
    MissingTensor
        A router or shared expert tensor is not in the checkpoint.
    CheckpointError
        The router has numbers that are NaN or infinite: it would choose experts all the same.
    """
    if isinstance(experts, str) and experts != "resident":
        raise ValueError(f'experts is a store or "resident", not {experts!r}')
    if speculator is not None and not isinstance(speculator, Speculator):
        raise TypeError(f"speculator is a Speculator, Speculator(predictor), or None; got {speculator!r}")
    layout = path if isinstance(path, Layout) else build_layout(path)
    row = forward_of(layout.family, layout.format)
    located = layer_experts(layout, layer)
    for record in located.records:
        _check_decodable(record, layout.family, row)
    check_biases(layout, located, row.roles, takes_biases(row.ffn))
    top_k = top_k_of(layout, layer)
    if not top_k or top_k > len(located):
        raise UnsupportedCheckpoint(f"config.json: top-k is {top_k} and the layer has {len(located)} experts")
    if layout.format == "gguf":
        _check_names(layout, layer, row)
    router_weight = _router_weight(layout, layer, row.router_weight, trunk)
    if router_weight.ndim != 2 or len(router_weight) != len(located):
        raise UnsupportedCheckpoint(
            f"layer {layer}: the router has shape {router_weight.shape} and there are {len(located)} experts"
        )

    finite(weight_name(layout, layer, row.router_weight), to_float32(router_weight))

    def optional(name: str | None) -> F32 | None:
        return None if name is None else finite(weight_name(layout, layer, name), layer_tensor(layout, layer, name))

    bias = optional(row.router_bias)
    if bias is not None and bias.shape != (len(located),):
        raise UnsupportedCheckpoint(
            f"layer {layer}: the router's bias has shape {bias.shape}, of {len(located)} experts"
        )
    router = row.router(layout.config, top_k, optional(row.choice_bias if row.has_choice_bias(layout.config) else None))
    try:
        router(np.zeros((1, len(located)), np.float32))
    except ValueError as error:
        raise UnsupportedCheckpoint(f"config.json: {error}") from error
    shared: Mapping[str, NDArray[Any]] | None = None
    if row.has_shared(layout.config):
        names = {role: str(row.shared).format(role) for role in row.roles}
        if trunk is None:
            shared = {role: layer_tensor(layout, layer, name) for role, name in names.items()}
        else:
            shared = labelled(trunk, {role: weight_name(layout, layer, name) for role, name in names.items()})
    latent = load_latent(layout, layer, row)
    hidden = router_weight.shape[1]
    for record in located.records:
        arrays = hollow((view.label, view.dtype, view.shape) for view in record.views)
        check_shapes(f"layer {layer}: experts", arrays, row.roles, hidden if latent is None else latent.width)
    if shared is not None:
        check_shapes(f"layer {layer}: the shared expert", shared, row.roles, hidden)
    return MoEBlock(
        layer=layer,
        family=layout.family,
        top_k=top_k,
        experts=ResidentExperts(layout, layer) if isinstance(experts, str) else experts,
        gate=Gate(router_weight, bias, router),
        ffn=row.ffn(layout.config),
        shared=shared,
        shared_gate=None if shared is None else _as_row(optional(row.shared_gate)),
        speculator=speculator,
        weighs_input=row.weighs_input,
        latent=latent,
        names=row.names(layout.config),
    )


def _router_weight(layout: Layout, layer: int, name: str, trunk: Mapping[str, NDArray[Any]] | None) -> NDArray[Any]:
    if trunk is not None:
        stored = trunk.get(weight_name(layout, layer, name))
        if stored is not None and is_plain(stored.dtype):
            return stored
    return layer_tensor(layout, layer, name)


def _as_row(array: F32 | None) -> F32 | None:
    """[1, hidden], of which GGUF keeps [hidden]."""
    return None if array is None else array.reshape(1, -1)


def _check_names(layout: Layout, layer: int, row: Forward) -> None:
    """Refuse a layer of a GGUF file with MoE tensors that the row knows nothing of: the output would lack them."""
    known = row.names()
    found = [name.removeprefix(f"blk.{layer}.") for name in layout.trunk if name.startswith(f"blk.{layer}.")]
    more = sorted(name for name in found if _MOE_NAME.match(name) and name not in known)
    if more:
        raise UnsupportedCheckpoint(
            f"layer {layer}: the NumPy forward of {layout.family!r} does not compute with {', '.join(more)}, which "
            f"this file has; the bytes are served: use fastcache.open and your own forward"
        )


def _check_decodable(record: Record, family: str, row: Forward) -> None:
    arrays = hollow((view.label, view.dtype, view.shape) for view in record.views)
    for role in row.roles:
        try:
            check_decodable(arrays, role)
        except UnsupportedCheckpoint as error:
            raise UnsupportedCheckpoint(
                f"the NumPy forward of {family!r} cannot use these experts: {error}; use fastcache.open and your own"
            ) from error
