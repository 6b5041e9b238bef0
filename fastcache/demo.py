"""The demo: a made-up model decodes through a store smaller than its experts, bit for bit as if they were resident.

Owns the run and its figures; the command line shows them. Imports the public API, moe, fixture and rawread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fastcache
from fastcache import fixture, rawread
from fastcache.budget import Facts, parse_budget
from fastcache.moe import Speculator, load_block
from fastcache.predictors import NullPredictor, RouterLookahead

Progress = Callable[[str, int, int], object]  # stage, done, total
PREDICTORS = {"lookahead": RouterLookahead, "none": NullPredictor}
CEILING_ROUNDS = 3
STREAM_BATCH = 8  # experts per cold batch when the store's reading is timed alone
STREAM_LIMIT = 1 << 30  # bytes read by that timing, at most


@dataclass(frozen=True, slots=True)
class Step:
    """One MoE block at one token."""

    layer: int
    x: np.ndarray  # float32 [1, hidden]: what the block was given
    y: np.ndarray  # float32 [1, hidden]: what it returned


def run(
    directory: Path,
    *,
    size: int,
    budget: int | str | None = None,
    tokens: int = 32,
    engine: str | None = None,
    predictor: str = "lookahead",
    seed: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Write a checkpoint of about `size` bytes into `directory`, decode `tokens` tokens twice, and return the figures.

    The second run holds one layer's experts at a time fully in memory and gives every block the inputs that it had in
    the first. As each output is compared with the first run's by its bits, agreement at every step means that a
    whole resident decode gives the same bits too, and the model may still be larger than memory.

    `budget` is `fastcache.open`'s; None is half of the expert bytes. `predictor` is what is read ahead: "lookahead",
    what the next layer's router would choose for this layer's input, or "none". Leave NumPy
    one BLAS thread: more of them wait for each other, and for the threads that read.
    """
    if budget is not None:  # a wrong one is told before anything is written
        wanted = fixture.demo_shape(size)
        expert_bytes = wanted.layers * wanted.experts * wanted.expert_nbytes
        cycle_bytes = wanted.layers * wanted.top_k * wanted.expert_nbytes
        parse_budget(budget, Facts(expert_bytes, cycle_bytes, trunk_bytes=0, free_bytes=0))
    _check_settings(directory, engine)
    shape = fixture.write_demo_checkpoint(
        directory, size, seed=seed, progress=lambda done, total: progress("writing the checkpoint", done, total)
    )
    ceiling = _ceiling(sorted(directory.glob("*.safetensors")), progress)

    expert_bytes = shape.layers * shape.experts * shape.expert_nbytes
    allowed = expert_bytes // 2 if budget is None else budget
    with fastcache.open(directory, budget=allowed, engine=engine, verify="off") as store:
        speculator = Speculator(PREDICTORS[predictor]())
        blocks = [load_block(directory, layer, experts=store, speculator=speculator) for layer in range(shape.layers)]
        started = time.perf_counter()
        steps = _decode(store, blocks, shape, tokens, seed, progress)
        seconds = time.perf_counter() - started
        stats = store.stats()
        streamed, stream_seconds = _stream(store, seed, progress)
        described = store.describe().to_dict()

    started = time.perf_counter()
    differing, resident_seconds = _compare(directory, steps, shape.layers, progress)
    return {
        "bit_identical": not differing,
        "differing_steps": differing,
        "steps": len(steps),
        "tokens": tokens,
        "layers": shape.layers,
        "experts_per_layer": shape.experts,
        "top_k": shape.top_k,
        "expert_nbytes": shape.expert_nbytes,
        "checkpoint_bytes": shape.nbytes,
        "engine": described["engine"]["used"],
        "direct": described["direct"]["used"],
        "hugepages_fraction": described["hugepages"]["fraction"],
        "budget_bytes": described["budget_bytes"],
        "arena_bytes": described["arena_bytes"],
        "requests": stats.requests,
        "hits": stats.hits,
        "joins": stats.joins,
        "misses": stats.misses,
        "predictor": speculator.predictor.name,
        "recall": speculator.stats().recall,
        "prefetch_loads": stats.prefetch_loads,
        "first_consumptions": stats.first_consumptions,
        "reuses": stats.reuses,
        "late_joins": stats.late_joins,
        "wasted": stats.wasted,
        "evictions": stats.evictions,
        "bytes_read": stats.bytes_read,
        "tokens_per_s": tokens / seconds,
        "resident_tokens_per_s": tokens / resident_seconds,
        "decode_gb_per_s": stats.bytes_read / seconds / 1e9,
        "read_gb_per_s": streamed / stream_seconds / 1e9 if streamed else 0.0,
        "ceiling_gb_per_s": ceiling.gb_per_s,
        "ceiling_direct": ceiling.direct,
        "describe": described,
    }


def _check_settings(directory: Path, engine: str | None) -> None:
    """Open a store of one page: a setting that cannot be, of the environment too, is told before there is work."""
    page = directory / "page"
    page.write_bytes(bytes(4096))
    fastcache.open(fastcache.FileRangeSource(page, {(0, 0): (0, 4096)}), "all", engine=engine, verify="off").close()
    page.unlink()


def _ceiling(paths: list[Path], progress: Progress) -> rawread.RawRead:
    """Return the best of a few measurements: a ceiling is what was reached, and other work only lowers it."""
    best = rawread.measure(paths)
    for done in range(1, CEILING_ROUNDS):
        progress("measuring the raw ceiling", done, CEILING_ROUNDS)
        best = max(best, rawread.measure(paths), key=lambda result: result.gb_per_s)
    progress("measuring the raw ceiling", CEILING_ROUNDS, CEILING_ROUNDS)
    return best


def _rms_norm(x: np.ndarray) -> np.ndarray:
    """Return float32 [T, hidden] with each row scaled to a root mean square of 1."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6)), dtype=np.float32)


def _decode(
    store: fastcache.ExpertStore,
    blocks: Iterable[Callable[[np.ndarray], np.ndarray]],
    shape: fixture.DemoShape,
    tokens: int,
    seed: int,
    progress: Progress,
) -> list[Step]:
    """Decode a synthetic stream: half of each token is what the model made of the one before, half is new."""
    blocks = list(blocks)
    rng = np.random.default_rng(seed)
    x = np.zeros((1, shape.hidden), np.float32)
    steps: list[Step] = []
    for token in range(tokens):
        x = _rms_norm(_rms_norm(x) + rng.standard_normal(x.shape, dtype=np.float32))
        for layer, block in enumerate(blocks):
            h = _rms_norm(x)
            y = block(h)
            steps.append(Step(layer, h, y))
            x = x + y
        progress("decoding through the store", token + 1, tokens)
    while store.stats().prefetch_in_flight:  # so that the counters are at rest
        time.sleep(0.001)
    return steps


def _stream(store: fastcache.ExpertStore, seed: int, progress: Progress) -> tuple[int, float]:
    """Time cold demand batches with no arithmetic beside them. Returns bytes read and seconds."""
    before = store.stats().bytes_read
    nbytes, seconds = 0, 0.0
    order = random.Random(seed)
    while nbytes < STREAM_LIMIT and seconds < 3:
        cold = [key for key in store if not store.is_resident(key)]
        if not cold:
            break
        order.shuffle(cold)
        for at in range(0, len(cold) - STREAM_BATCH + 1, STREAM_BATCH) or (0,):
            started = time.perf_counter()
            store.acquire_many(cold[at : at + STREAM_BATCH]).release()
            seconds += time.perf_counter() - started
            nbytes = store.stats().bytes_read - before
            progress("timing the store's reads", min(nbytes, STREAM_LIMIT), STREAM_LIMIT)
            if nbytes >= STREAM_LIMIT:
                break
    progress("timing the store's reads", STREAM_LIMIT, STREAM_LIMIT)
    return nbytes, seconds


def _compare(directory: Path, steps: list[Step], layers: int, progress: Progress) -> tuple[int, float]:
    """Compute every step again from resident experts. Returns how many differ in any bit, and the seconds computed."""
    differing, seconds, done = 0, 0.0, 0
    for layer in range(layers):
        block = load_block(directory, layer, experts="resident")
        for step in steps:
            if step.layer != layer:
                continue
            started = time.perf_counter()
            y = block(step.x)
            seconds += time.perf_counter() - started
            differing += y.dtype != step.y.dtype or y.tobytes() != step.y.tobytes()
            done += 1
            progress("computing with resident experts", done, len(steps))
        del block  # before the next layer comes in
    return differing, seconds
