"""The README and its pages keep their word: their Python runs, what they name exists, and their tables are whole."""

import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastcache
from fastcache import errors
from fastcache.cli import main
from fastcache.fixture import DemoShape, write_demo_checkpoint
from fastcache.settings import resolve
from fastcache.store import POLICIES
from fastcache.units import parse_bytes

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
SHAPE = DemoShape(layers=6, experts=32, intermediate=8)  # a real hidden width, so that an example's x fits


PAGES = {name: ROOT / "docs" / f"{name}.md" for name in ("calls", "options", "errors", "formats", "measured")}
PAGES["README"] = README
WORDS = 1400  # of the README: what a first visit is given to read; the rest has its pages


def text(page: str) -> str:
    if not PAGES[page].exists():
        pytest.skip(f"no {page}.md")
    return PAGES[page].read_text()


def blocks(page: str, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", text(page), flags=re.MULTILINE | re.DOTALL)
    return [block for language, block in found if language in languages]


def rows(page: str) -> list[list[str]]:
    """The cells of a page's tables, without their heads."""
    lines = [line for line in text(page).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_variable_that_open_reads_is_named():
    files = (ROOT / "fastcache").rglob("*.py")
    read = {name for file in files for name in re.findall(r'"(FASTCACHE_[A-Z_]+)"', file.read_text())}
    assert len(read) >= 9
    assert read == set(re.findall(r"FASTCACHE_[A-Z_]+", text("options") + text("README")))


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
    page = " ".join(text("formats").split())
    for pattern, (name,) in wanted:
        found = re.search(pattern, page)
        assert found, pattern
        rate = rates.get(name) or blocks[name]
        assert int(found[1].replace(",", "")) == (rate if rate < 100 else round(rate, -1)), (name, rate)


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page, disk):
    code = "\n".join(blocks(page, "python"))
    if not code:
        assert page in ("options", "errors", "measured")
        return
    assert "import fastcache" in code
    home = disk / f"readme-{page}"
    home.mkdir()
    for name in re.findall(r"""moe\.load\(\s*["']([^"']+)["']""", code):  # what computes tokens needs all of a model
        shutil.copytree(ROOT / "tests" / "data" / "qwen3_moe" / "f32", home / name, dirs_exist_ok=True)
    for name in re.findall(r"""(?:fastcache\.open|load_block|moe\.load)\(\s*["']([^"']+)["']""", code):
        if not (home / name).exists():
            write_demo_checkpoint(home / name, shape=SHAPE)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=home, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    if "replay_exact" in code:
        assert "True True" in result.stdout.splitlines()  # as the page says


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_exist_with_their_options(page):
    lines = [line.strip() for block in blocks(page, "", "sh", "bash", "console") for line in block.splitlines()]
    lines += re.findall(r"`((?:fastcache|bash) [^`]+)`", text(page))
    assert lines or page in ("options", "errors", "formats", "measured")
    for line in lines:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[:1] == ["bash"]:
            assert (ROOT / words[1]).exists(), line
        if words[:1] == ["fastcache"]:
            command = main
            while getattr(command, "commands", None) and len(words) > 1 and words[1] in command.commands:
                command, words = command.commands[words[1]], words[1:]
            assert command is not main or words[1].startswith("--"), line
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known | {"--help", "--version"}, line


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_is_there(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text(page)):
        assert (PAGES[page].parent / target).exists(), target


def test_the_readme_is_short_enough_for_a_first_visit():
    assert len(text("README").split()) <= WORDS


def test_the_page_of_options_has_every_option_with_its_default_its_values_and_its_variable(monkeypatch):
    for variable in re.findall(r"FASTCACHE_[A-Z_]+", text("options")):
        monkeypatch.delenv(variable, raising=False)
    table = {row[0].strip("`"): row[1:] for row in rows("options")}
    assert list(table) == list(inspect.signature(fastcache.open).parameters)[1:]
    built_in = resolve(policies=tuple(POLICIES))
    in_words = {"budget", "overflow", "guess_bytes", "timeout", "name", "progress"}
    for option, (takes, default, _) in table.items():
        if option == "verify":
            assert default == '`"off"`' and built_in.verify is None
        elif option == "chunk":
            assert parse_bytes(default.strip('`"'), "chunk") == built_in.chunk
        elif option in in_words:
            assert option in ("name", "progress", "budget") or getattr(built_in, option) is None
        else:
            assert default.strip("`") == str(getattr(built_in, option)) or default == f'`"{getattr(built_in, option)}"`'
        if option not in in_words | {"verify"}:
            for value in re.findall(r'`"(\w+)"`', takes):
                resolve(policies=tuple(POLICIES), **{option: value})
    assert set(re.findall(r'"(\w+)"', table["policy"][0])) == {*POLICIES, "auto"}
    source = (ROOT / "fastcache" / "settings.py").read_text()
    read = dict(re.findall(r'_pick\("(\w+)", \w+, "(FASTCACHE_\w+)"', source))
    assert {option: cells[2].strip("`") for option, cells in table.items() if cells[2]} == read


def test_the_page_of_errors_has_every_error_with_what_it_is_also_and_what_it_means():
    builtin = (Exception, BaseException, object, BaseExceptionGroup, errors.FastcacheError)
    wanted = []
    for name, error in vars(errors).items():
        if isinstance(error, type) and error.__module__ == errors.__name__:
            also = ", ".join(f"`{base.__name__}`" for base in error.__mro__[1:] if base not in builtin)
            meaning = inspect.cleandoc(error.__doc__).split("\n\n")[0].replace("\n", " ")
            wanted.append([f"`{name}`", also, meaning])
    assert rows("errors") == wanted


def test_every_call_that_the_page_of_calls_names_exists():
    named = set(re.findall(r"`(?:with )?(store|lease|guess)\.(\w+)", text("calls")))
    owners = {"store": fastcache.ExpertStore, "lease": fastcache.ExpertLease, "guess": fastcache.Prefetch}
    assert len(named) > 20
    for owner, name in named:
        assert hasattr(owners[owner], name) or (owner, name) == ("store", "trunk"), (owner, name)
