"""The README keeps its word: its Python runs on a small checkpoint, its commands and their options exist."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastcache.cli import main
from fastcache.fixture import DemoShape, write_demo_checkpoint

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
SHAPE = DemoShape(layers=6, experts=32, intermediate=8)  # a real hidden width, so that an example's x fits


def blocks(*languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


@pytest.fixture(autouse=True)
def _readme() -> None:
    if not README.exists():
        pytest.skip("no README.md")


def test_every_variable_that_open_reads_is_named():
    files = (ROOT / "fastcache").rglob("*.py")
    read = {name for file in files for name in re.findall(r'"(FASTCACHE_[A-Z_]+)"', file.read_text())}
    assert len(read) >= 9
    assert read == set(re.findall(r"FASTCACHE_[A-Z_]+", README.read_text()))


def test_the_rates_of_decoding_are_the_receipts():
    path = ROOT / "bench" / "receipts" / "decoding.json"
    if not path.exists():
        pytest.skip("no receipts")
    medians = json.loads(path.read_text())["median_million_weights_per_second"]
    rates = {name: arms["linear"] for name, arms in medians.items()}
    blocks = {name.removeprefix("GGML "): rate for name, rate in rates.items() if name.startswith("GGML ")}
    slow, fast = min(blocks, key=blocks.__getitem__), max(blocks, key=blocks.__getitem__)
    words = [name for name in rates if name.startswith(("GPTQ", "AWQ"))]
    wanted = [
        (rf"NumPy code \(([\d,]+) million weights a second for {slow} to", [slow]),
        (rf"to ([\d,]+) for {fast}\)", [fast]),
        (r"at ([\d,]+) million weights a second \(int4 with zero points\)", ["int4, groups of 32, zero points"]),
        (r"to ([\d,]+) \(FP8 by row\)", ["E4M3, by row"]),
        (r"and ([\d,]+) \(int8; one core", ["int8, by row"]),
        (r"quantised attention, at ([\d,]+) to", [min(words, key=rates.__getitem__)]),
        (r"quantised attention, at [\d,]+ to ([\d,]+)\.", [max(words, key=rates.__getitem__)]),
    ]
    text = " ".join(README.read_text().split())
    for pattern, (name,) in wanted:
        found = re.search(pattern, text)
        assert found, pattern
        rate = rates.get(name) or blocks[name]
        assert int(found[1].replace(",", "")) == (rate if rate < 100 else round(rate, -1)), (name, rate)


def test_the_python_of_the_readme_runs(disk):
    code = "\n".join(blocks("python"))
    assert "import fastcache" in code
    home = disk / "readme"
    for name in re.findall(r"""moe\.load\(\s*["']([^"']+)["']""", code):  # what computes tokens needs all of a model
        shutil.copytree(ROOT / "tests" / "data" / "qwen3_moe" / "f32", home / name, dirs_exist_ok=True)
    for name in re.findall(r"""(?:open|load_block|load)\(\s*["']([^"']+)["']""", code):
        if not (home / name).exists():
            write_demo_checkpoint(home / name, shape=SHAPE)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=home, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_commands_of_the_readme_exist_with_their_options():
    lines = [line.strip() for text in blocks("", "sh", "bash", "console") for line in text.splitlines()]
    assert lines
    for line in lines:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[:1] == ["bash"]:
            assert (ROOT / words[1]).exists(), line
        if words[:1] == ["fastcache"]:
            command = main
            while getattr(command, "commands", None) and len(words) > 1 and words[1] in command.commands:
                command, words = command.commands[words[1]], words[1:]
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known | {"--help", "--version"}, line
