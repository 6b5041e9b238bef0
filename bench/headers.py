"""How long a very large checkpoint takes to open: a header set of Kimi K3's size, whose tensors are holes.

    python bench/headers.py make DIR       # 140 MB on DIR's disk
    python bench/headers.py measure DIR    # and write the receipt

96 shards of 497,220 tensors, by the published shapes: 92 MoE layers of 896 experts of six tensors each (MXFP4 of
3584 x 3072, by compressed-tensors' names), 21 to 27 other tensors a layer, and made-up ones of a vision tower up to the
count. Each measurement is a fresh process with the headers in the page cache; the time is that of `import fastcache`
and `fastcache.open`, the memory the process's largest.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import Script, Steal, facts, write_receipt
from shards import INDEX, Entry, header, write_index

TENSORS, SHARDS = 497_220, 96
LAYERS, EXPERTS, TOP_K = 93, 896, 16  # the first layer is dense
HIDDEN, LATENT, WIDTH = 7168, 3584, 3072  # of the model, of what its routed experts work in, of an expert
PREFIX = "language_model.model."
MOST_SECONDS, MOST_RSS = 3.0, 400_000_000  # the goal

OPEN = """
import time
begin = time.perf_counter()
import ctypes, json, logging, resource, sys
import fastcache
imported = time.perf_counter()
logging.disable(logging.WARNING)  # the budget is small on purpose
class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c hblkhd d e uordblks f g".split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap
def heap():
    now = libc.mallinfo2()
    return now.uordblks + now.hblkhd
before = heap()
opening = time.perf_counter()
with fastcache.open(sys.argv[1], budget=0) as store:
    opened = time.perf_counter()
    said = store.describe()
    print(json.dumps({
        "import_seconds": imported - begin,
        "open_seconds": opened - opening,
        "seconds": imported - begin + opened - opening,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "experts": len(store),
        "metadata_bytes": said["metadata_bytes"],
        "metadata_bytes_per_expert": said["metadata_bytes_per_expert"],
        "heap_bytes_kept": heap() - before,
    }))
"""

INSPECT = """
import time
begin = time.perf_counter()
import json, resource, sys
from fastcache.inspection import inspect_checkpoint
figures = inspect_checkpoint(sys.argv[1])
seconds = time.perf_counter() - begin
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak_rss_bytes": rss, "problems": figures["problems"]}))
"""


def expert_tensors(layer: int, experts: int) -> Iterator[Entry]:
    """The six tensors of each routed expert of a layer."""
    for expert in range(experts):
        for module, rows, columns in (("w1", WIDTH, LATENT), ("w2", LATENT, WIDTH), ("w3", WIDTH, LATENT)):
            name = f"{PREFIX}layers.{layer}.block_sparse_moe.experts.{expert}.{module}"
            yield f"{name}.weight_packed", "U8", (rows, columns // 2)
            yield f"{name}.weight_scale", "U8", (rows, columns // 32)


def other_tensors(layer: int) -> Iterator[Entry]:
    """Attention (every fourth layer's is MLA), norms, router, shared experts."""
    attention = {f"{x}_proj.weight": (96 * 128, HIDDEN) for x in "qkv"} | {"o_proj.weight": (HIDDEN, 96 * 128)}
    attention |= {f"{x}_conv1d.weight": (96 * 128, 1, 4) for x in "qkv"} | {"A_log": (128,), "dt_bias": (96 * 128,)}
    attention |= {"f_a_proj.weight": (128, HIDDEN), "f_b_proj.weight": (96 * 128, 128), "b_proj.weight": (96, HIDDEN)}
    attention |= {"g_proj.weight": (96 * 128, HIDDEN), "o_norm.weight": (128,)}
    if layer % 4 == 3 or layer == LAYERS - 1:
        attention = {"q_a_proj.weight": (1536, HIDDEN), "q_a_layernorm.weight": (1536,)}
        attention |= {"q_b_proj.weight": (96 * 192, 1536), "kv_a_proj_with_mqa.weight": (576, HIDDEN)}
        attention |= {"kv_a_layernorm.weight": (512,), "kv_b_proj.weight": (96 * 256, 512)}
        attention |= {"g_proj.weight": (96 * 128, HIDDEN), "o_proj.weight": (HIDDEN, 96 * 128)}
    rest: dict[str, tuple[int, ...]] = {f"self_attn.{name}": shape for name, shape in attention.items()}
    for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
        rest[f"{name}.weight"] = (HIDDEN,)
    rest |= {f"{name}_res_proj.weight": (1, HIDDEN) for name in ("self_attention", "mlp")}
    block, width = ("mlp", 33792) if layer == 0 else ("block_sparse_moe.shared_experts", 2 * WIDTH)
    rest |= {f"{block}.{name}_proj.weight": (width, HIDDEN) for name in ("gate", "up")}
    rest[f"{block}.down_proj.weight"] = (HIDDEN, width)
    if layer:
        moe = {"gate.weight": (EXPERTS, HIDDEN), "gate.e_score_correction_bias": (EXPERTS,)}
        moe |= {"routed_expert_down_proj.weight": (LATENT, HIDDEN), "routed_expert_up_proj.weight": (HIDDEN, LATENT)}
        rest |= {f"block_sparse_moe.{name}": shape for name, shape in moe.items()}
    for name, shape in rest.items():
        dtype = "F32" if name.endswith(("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "_bias")) else "BF16"
        yield f"{PREFIX}layers.{layer}.{name}", dtype, shape


def shards(layers: int = LAYERS, experts: int = EXPERTS, tensors: int = TENSORS) -> list[list[Entry]]:
    """A shard per layer, and three for what stands around them; `tensors` in all."""
    files = [[*other_tensors(layer), *(expert_tensors(layer, experts) if layer else ())] for layer in range(layers)]
    files.append([(f"{PREFIX}embed_tokens.weight", "BF16", (163840, HIDDEN))])
    files.append([(f"{PREFIX}{name}.weight", "BF16", (HIDDEN,)) for name in ("norm", "output_attn_res_norm")])
    files[-1] += [(f"{PREFIX}output_attn_res_proj.weight", "BF16", (1, HIDDEN))]
    files[-1] += [("language_model.lm_head.weight", "BF16", (163840, HIDDEN))]
    missing = max(1, tensors - sum(map(len, files)))
    block = "vision_tower.encoder.blocks"
    files.append([(f"{block}.{n // 10}.{n % 10}.weight", "BF16", (1152, 1152)) for n in range(missing)])
    return files


def make(directory: Path, **shape: int) -> dict[str, int]:
    """Write the checkpoint into `directory` (made if missing) and return how large it is."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = shards(**shape)
    files = {f"model-{n:05d}-of-{len(entries):06d}.safetensors": each for n, each in enumerate(entries, 1)}
    header_bytes = 0
    for name, each in files.items():
        head, _, size = header(each)
        header_bytes += len(head)
        with open(directory / name, "wb") as file:
            file.write(head)
            file.truncate(len(head) + size)
    experts = len({entry[0].split(".")[6] for each in entries for entry in each if ".experts." in entry[0]})
    text = {
        "model_type": "kimi_linear",
        "num_hidden_layers": len(entries) - 3,
        "num_experts": experts,
        "num_experts_per_token": min(TOP_K, experts),
        "hidden_size": HIDDEN,
        "routed_expert_hidden_size": LATENT,
        "moe_intermediate_size": WIDTH,
    }
    index_bytes = write_index(directory, files, {"model_type": "kimi_k3", "text_config": text})
    tensors = sum(map(len, entries))
    return {"shards": len(files), "tensors": tensors, "header_bytes": header_bytes, "index_bytes": index_bytes}


def size_of(directory: Path) -> dict[str, int]:
    """What `make` returned, from the files."""
    files = sorted(directory.glob("*.safetensors"))
    header_bytes = 0
    for path in files:
        with open(path, "rb") as file:
            header_bytes += 8 + int.from_bytes(file.read(8), "little")
    tensors = len(json.loads((directory / INDEX).read_bytes())["weight_map"])
    index_bytes = (directory / INDEX).stat().st_size
    return {"shards": len(files), "tensors": tensors, "header_bytes": header_bytes, "index_bytes": index_bytes}


def run(program: str, directory: Path) -> dict[str, Any]:
    """Run a program that prints JSON in a fresh process."""
    command = [sys.executable, "-c", program, str(directory.resolve())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[1])
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(directory: Path, rounds: int) -> dict[str, Any]:
    """Open and inspect in turn, after one round that warms the page cache; all runs, and their medians."""
    runs: dict[str, list[dict[str, Any]]] = {"open": [], "inspect": []}
    with Steal() as steal:
        for round_ in range(rounds + 1):
            for name, program in (("open", OPEN), ("inspect", INSPECT)):
                found = run(program, directory)
                if round_:
                    runs[name].append(found)
    medians = {
        name: {key: statistics.median(each[key] for each in found) for key in ("seconds", "peak_rss_bytes")}
        for name, found in runs.items()
    }
    return {"median": medians, "runs": runs, "steal": steal.share}


def main() -> None:
    parser = Script(__doc__)
    parser.add_argument("what", choices=("make", "measure"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.what == "make":
        print(make(options.directory))
        return
    found = measure(options.directory, options.rounds)
    opened = found["median"]["open"]
    met = opened["seconds"] <= MOST_SECONDS and opened["peak_rss_bytes"] <= MOST_RSS
    print(f"{opened['seconds']:.2f} s, {opened['peak_rss_bytes'] / 1e6:.0f} MB: the goal is {'' if met else 'NOT '}met")
    goal = {"seconds": MOST_SECONDS, "peak_rss_bytes": MOST_RSS, "met": met}
    path = write_receipt(
        "headers", {**facts(options.directory), "checkpoint": size_of(options.directory), "goal": goal, **found}
    )
    print(path)


if __name__ == "__main__":
    main()
