"""Decode a checkpoint larger than memory under a budget, and watch the process's memory.

    python bench/large.py make DIR       # 41 GB on DIR's disk
    python bench/large.py measure DIR    # about five minutes; writes the receipt

The checkpoint has Qwen3-30B-A3B's names and shapes, 32 of its 48 layers, and random weights of such a scale that
activations stay near 1 and tokens choose different experts. Each run is a fresh process that decodes what its own
samples say; the figures of memory are the kernel's for that process: RssAnon is arena, interpreter and scratch, RssFile
the mapped trunk. RSS must stay within budget + trunk + 5 %, and tokens and logits must not depend on the budget.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import ml_dtypes
import numpy as np
from machine import Script, Steal, facts, write_receipt
from shards import Entry, header, nbytes, write_index

LAYERS, HIDDEN, EXPERTS, TOP_K, WIDTH, VOCABULARY = 32, 2048, 128, 8, 768, 151_936
HEADS, KV_HEADS, HEAD = 32, 4, 128
SHARD = 4 << 30
BUDGETS = ("8GiB", "2GiB")
PROMPT = 16  # tokens
POOL = 16_777_213  # a prime, so that rows of tables do not repeat
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "intermediate_size": 6144,
    "moe_intermediate_size": WIDTH,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}


def layer_tensors(layer: int) -> Iterator[Entry]:
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "self_attn.q_norm": (HEAD,),
        "self_attn.k_norm": (HEAD,),
        "mlp.gate": (EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        shapes |= {f"mlp.experts.{expert}.{name}_proj": (WIDTH, HIDDEN) for name in ("gate", "up")}
        shapes[f"mlp.experts.{expert}.down_proj"] = (HIDDEN, WIDTH)
    for name, shape in shapes.items():
        yield f"model.layers.{layer}.{name}.weight", "BF16", shape


def shards(layers: int) -> dict[str, list[Entry]]:
    """All tensors in the model's order, in files of at most 4 GiB."""
    table = (VOCABULARY, HIDDEN)
    entries: list[Entry] = [("model.embed_tokens.weight", "BF16", table)]
    for layer in range(layers):
        entries.extend(layer_tensors(layer))
    entries += [("model.norm.weight", "BF16", (HIDDEN,)), ("lm_head.weight", "BF16", table)]
    files: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if size + nbytes(entry) > SHARD:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += nbytes(entry)
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": each for n, each in enumerate(files, 1)}


class Weights:
    """BF16 numbers for any tensor: pieces of one pool per scale, from a random place, so that 41 GB cost seconds."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._unit = self._rng.standard_normal(POOL, np.float32)
        self._pools: dict[float, np.ndarray[Any, Any]] = {}

    def of(self, entry: Entry) -> Iterator[np.ndarray[Any, Any]]:
        """Norms are ones; a matrix gives outputs of deviation 1; routers' rows differ, so experts' traffic."""
        name, _, shape = entry
        if "norm" in name:
            yield np.ones(shape, ml_dtypes.bfloat16)
        elif name.endswith("mlp.gate.weight"):
            rows = np.exp(0.5 * self._rng.standard_normal((shape[0], 1), np.float32)) * shape[1] ** -0.5
            yield (self._rng.standard_normal(shape, np.float32) * rows).astype(ml_dtypes.bfloat16)
        else:
            scale = 1.0 if "embed" in name else shape[-1] ** -0.5
            if scale not in self._pools:
                self._pools[scale] = (self._unit * np.float32(scale)).astype(ml_dtypes.bfloat16)
            pool, at, left = self._pools[scale], int(self._rng.integers(POOL)), nbytes(entry) // 2
            while left:
                piece = pool[at : at + left]
                yield piece
                at, left = 0, left - len(piece)


def make(directory: Path, layers: int = LAYERS) -> int:
    """Write the checkpoint and return its bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    files, weights, total = shards(layers), Weights(), 0
    for name, entries in files.items():
        head, ordered, size = header(entries)
        with open(directory / name, "wb", buffering=0) as file:
            file.write(head)
            for entry in ordered:
                for piece in weights.of(entry):
                    file.write(piece.view(np.uint8).data)
            os.fsync(file.fileno())
            assert file.tell() == len(head) + size
        total += len(head) + size
        print(f"{name}: {total / 1e9:.1f} GB")
    write_index(directory, files, {**CONFIG, "num_hidden_layers": layers})
    return total


def decode(directory: str, budget: str, tokens: int) -> None:
    """The child: prefill a prompt, decode by seeded sampling, print a line of JSON, and one per step."""
    import fastcache.moe
    from fastcache.inspection import inspect_checkpoint

    def say(**values: Any) -> None:
        print(json.dumps(values), flush=True)

    watch = Watch()
    watch.start()
    rng = np.random.default_rng(1)
    prompt = rng.integers(VOCABULARY, size=PROMPT).tolist()
    opening = time.perf_counter()
    # Waits for the arena: on a virtual machine fresh memory may come more slowly than the disk reads.
    with fastcache.moe.load(directory, budget=budget, progress=lambda populated, arena: None) as model:
        store, cache = model.store, model.new_cache()
        trunk_bytes = inspect_checkpoint(directory)["trunk_bytes"]
        say(trunk_bytes=trunk_bytes, loading_seconds=round(time.perf_counter() - opening, 2))
        ids = prompt
        for _ in range(tokens):
            before, begin, busy = store.stats(), time.perf_counter(), time.thread_time()
            logits = model.forward(ids, cache, last_only=True)[0]
            seconds, busy, after = time.perf_counter() - begin, time.thread_time() - busy, store.stats()
            assert np.isfinite(logits).all()
            # Sampled by Gumbel's trick: a greedy walk through random weights soon runs in a circle.
            ids = [int((logits + rng.gumbel(size=len(logits)).astype(np.float32)).argmax())]
            say(
                token=ids[0],
                logits=hashlib.sha256(logits.tobytes()).hexdigest()[:16],
                seconds=round(seconds, 4),
                cpu_seconds=round(busy, 4),  # of the thread that decodes; the rest it waits
                bytes_read=after.bytes_read - before.bytes_read,
                **{name: getattr(after, name) - getattr(before, name) for name in ("requests", "hits", "evictions")},
            )
        say(curve=watch.end(), peak_rss_bytes=status("VmHWM"), memory=store.describe().to_dict())


class Watch(threading.Thread):
    """Looks at this process's memory five times a second: [seconds, VmRSS, RssAnon, RssFile, VmLck] in bytes."""

    COLUMNS = ("VmRSS", "RssAnon", "RssFile", "VmLck")

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.curve: list[list[float]] = []
        self._begin, self._ended = time.perf_counter(), threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.2):
            self.curve.append([round(time.perf_counter() - self._begin, 1), *map(status, self.COLUMNS)])

    def end(self) -> list[list[float]]:
        self._ended.set()
        self.join()
        return self.curve


def status(name: str) -> int:
    """What the kernel says of this process, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def run(directory: Path, budget: str, tokens: int, under: list[str]) -> dict[str, Any]:
    """Decode in a fresh process."""
    command = [sys.executable, __file__, "decode", str(directory), "--budget", budget, "--tokens", str(tokens)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([*under, *command], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    first, *steps, last = map(json.loads, done.stdout.splitlines())
    return summary(first, steps, last)


def summary(first: dict[str, Any], steps: list[dict[str, Any]], last: dict[str, Any]) -> dict[str, Any]:
    """One run's figures; the first step is the prompt's."""
    decoding = steps[1:]
    said, curve, most = last["memory"], last["curve"], last["peak_rss_bytes"]
    if library := said["engine"].get("liburing"):
        said["engine"]["liburing"] = os.sep.join(Path(library).parts[-2:])  # not where it lies on this machine
    budget, trunk = said["budget_bytes"], first["trunk_bytes"]
    total = {name: sum(step[name] for step in decoding) for name in ("seconds", "cpu_seconds", "bytes_read")}
    return {
        "budget_bytes": budget,
        "arena_bytes": said["arena_bytes"],
        "trunk_bytes": trunk,
        "peak_rss_bytes": most,
        "peak_rss_allowed_bytes": int((budget + trunk) * 1.05),
        "rss_met": most <= (budget + trunk) * 1.05,
        "prompt": {"tokens": PROMPT, **{k: steps[0][k] for k in ("seconds", "cpu_seconds", "bytes_read", "requests")}},
        "tokens_per_second": len(decoding) / total["seconds"],
        "wait_share": 1 - total["cpu_seconds"] / total["seconds"],
        "hit_rate": sum(step["hits"] for step in decoding) / sum(step["requests"] for step in decoding),
        "bytes_read_per_token": total["bytes_read"] / len(decoding),
        "bytes_read_per_second_of_waiting": total["bytes_read"] / (total["seconds"] - total["cpu_seconds"]),
        **{
            name: said[name]
            for name in ("engine", "direct", "hugepages", "registered", "policy", "overflow_peak_bytes")
        },
        "loading_seconds": first["loading_seconds"],
        "steps": steps,
        "curve_columns": ["seconds", *Watch.COLUMNS],
        "curve": curve[:: max(1, len(curve) // 200)],
    }


def main() -> None:
    parser = Script(__doc__)
    parser.add_argument("what", choices=("make", "measure", "decode"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--budget", default=BUDGETS[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--under", type=shlex.split, default=[], help="a command to run each decoder under, such as a lock"
    )
    options = parser.parse_args()
    if options.what == "make":
        print(make(options.directory), "bytes")
    elif options.what == "decode":
        decode(str(options.directory), options.budget, options.tokens)
    else:
        with Steal() as steal:
            runs = {budget: run(options.directory, budget, options.tokens, options.under) for budget in BUDGETS}
        one, two = ([(step["token"], step["logits"]) for step in each["steps"]] for each in runs.values())
        for budget, each in runs.items():
            print(
                f"{budget}: {each['tokens_per_second']:.2f} tokens/s, {each['hit_rate']:.0%} hits, "
                f"{each['wait_share']:.0%} waiting, {each['bytes_read_per_token'] / 1e9:.2f} GB read per token, "
                f"RSS {each['peak_rss_bytes'] / 1e9:.2f} of {each['peak_rss_allowed_bytes'] / 1e9:.2f} GB"
            )
        print("tokens and logits are", "the same" if one == two else "NOT the same")
        receipt = {**facts(options.directory), "steal": steal.share, "same": one == two, "runs": runs}
        print(write_receipt("large", receipt))


if __name__ == "__main__":
    main()
