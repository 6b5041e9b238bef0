"""Every import and cimport, held to one table: imports go down only, and one file crosses from Python to the core."""

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# unit -> what it may import. "std" is Python's library, "face" the public `import fastcache`.
FASTCACHE = {
    "keys": "",
    "errors": "keys",
    "units": "",
    "memory": "",
    "budget": "errors units",
    "settings": "errors units",
    "failures": "errors keys units",
    "describe": "settings sidecar units",
    "speculation": "describe devices units",
    "devices": "",
    "curve": "errors units",
    "pyworker": "",
    "stats": "errors units",
    "reports": "curve describe speculation stats fastcache_ext",  # how it was built
    "formats": "errors numpy ml_dtypes gguf",
    "layout": "errors keys formats numpy ml_dtypes",
    "sources": "errors keys units layout numpy typing_extensions",
    "placement": "errors keys layout numpy",
    "slabs": "placement",
    "inventory": "errors keys units formats layout sources placement numpy",
    "sizing": "budget inventory memory placement settings units numpy slabs",
    "sidecar": "errors fingerprint inventory outputs placement numpy fastcache_ext",  # its CRC alone
    "assembly": "errors units formats settings sidecar describe inventory placement sizing numpy",
    "waves": "",
    "warming": "errors keys",
    "fingerprint": "inventory numpy",
    "trunk": "errors formats layout numpy",
    "predictors": "errors keys outputs units numpy",
    "store": "assembly errors keys units settings failures curve describe speculation stats reports fingerprint "
    "placement inventory sizing sidecar pyworker warming waves recording trunk formats layout sources numpy "
    "fastcache_ext",
    "opening": "settings store",
    "outputs": "",
    "integrity": "errors failures fingerprint inventory keys outputs settings sidecar store numpy",
    "recording": "errors outputs units settings inventory sizing traces face numpy fastcache_ext",  # face: version
    "metrics": "describe errors reports stats store prometheus_client",
    "traces": "errors keys outputs units budget memory layout placement slabs rawread assembly fingerprint inventory "
    "sizing numpy matplotlib fastcache_ext",
    "quant": "errors formats numpy ml_dtypes gguf",
    "linear": "errors formats quant numpy",
    "moe": "errors keys units formats layout quant linear trunk predictors settings store opening numpy ml_dtypes "
    "tokenizers",
    "registering": "layout moe",
    "__init__": "errors keys layout sources stats store linear opening registering",
    "fixture": "outputs numpy",
    "rawread": "numpy",
    "demo": "budget face moe predictors fixture rawread numpy",
    "seed_replay": "face fixture numpy",
    "shards": "errors formats inventory layout numpy",
    "packing": "errors outputs units formats inspection inventory layout shards sidecar fastcache_ext",  # its CRC
    "inspection": "errors inventory layout quant numpy",
    "cli": "errors units outputs traces fixture demo seed_replay inspection integrity packing face moe click rich "
    "threadpoolctl",
    "__main__": "cli",
}
# The same for the compiled half. libc and the atomics are open to all of it.
EXT = {
    "__init__": "",
    "atomics": "",
    "built": "",
    "sealed": "",
    "threads": "posix",
    "arena": "posix std",
    "evidence": "",
    "counters": "arena ioqueue",  # their error codes
    "policy": "lru lfu s3fifo sieve next_use",  # the registry: name -> implementation
    "lru": "policy",
    "rows": "",
    "rounds": "",
    "blend": "rows",
    "next_use": "policy blend rounds rows",
    "order": "policy",
    "lfu": "policy order",
    "s3fifo": "policy order",
    "sieve": "policy order",
    "recorder": "counters policy threads posix std",
    "crc": "cpython",
    "sums": "crc",
    "table": "policy arena counters",
    "trade": "arena policy table",
    "room": "counters evidence monitor policy recorder table trade",
    "ghost": "policy",
    "stack": "",
    "ghosts": "ghost stack threads",
    "ioqueue": "posix",
    "files": "ioqueue posix cpython std",
    "liburing": "std",
    "pread": "ioqueue threads posix",
    "ring": "liburing",
    "uring": "ioqueue liburing ring threads posix std",
    "monitor": "threads counters evidence ghosts arena policy sums table ioqueue landing recorder",
    "waiting": "evidence table ioqueue monitor room",  # of monitor, its structs
    "landing": "threads counters evidence arena sums table ioqueue files monitor recorder waiting",  # likewise
    "port": "threads counters evidence ioqueue landing monitor room",
    "requests": "threads counters evidence ghosts arena policy table ioqueue monitor landing recorder room waiting",
    "auto": "arena ioqueue policy table monitor ghosts recorder threads",
    "worker": "arena monitor landing auto ghosts threads uring",
    "hold": "arena monitor",
    "given": "cpython std",
    "core": "given threads counters evidence ghosts arena policy sums table ioqueue files liburing pread uring monitor "
    "port worker recorder cpython std hold",
    "tape": "arena monitor recorder core cpython std",
    "checker": "monitor recorder table",
    "replay": "checker arena counters evidence policy table ioqueue monitor landing recorder requests waiting cpython",
    "report": "arena counters monitor recorder table uring waiting core",
    "watch": "auto core ghosts policy threads",
    "batch": "sealed threads arena counters ioqueue monitor recorder requests core hold cpython",
    "arguments": "core given",
    "views": "sealed arena hold cpython numpy std",
    "lender": "arguments hold report views",
    "guesses": "evidence ioqueue monitor threads uring lender std",
    "handles": "sealed arena ioqueue monitor requests arguments batch lender views",
    "simulate": "arena table trade policy cpython",
    "belady": "cpython",
    "distances": "cpython",
    "serve": "arena table core given monitor requests hold batch arguments lender guesses handles views",
    "scripted": "evidence arena table policy ioqueue monitor port requests core hold batch views serve threads "
    "posix cpython std",
    "driven": "arena table trade policy threads std",
}
EVERYWHERE = {"fastcache": {"std"}, "fastcache_ext": {"libc", "cython", "atomics"}}
MAX_LINES = 400

_CYTHON_IMPORT = re.compile(
    r"""^[ \t]* (?: from [ \t]+ (?P<base>[\w.]+) [ \t]+ c?import [ \t]+ (?P<names> \([^)]*\) | [^\n]+ )
               | c?import [ \t]+ (?P<plain>[\w., \t]+) )""",
    re.MULTILINE | re.VERBOSE,
)


def python_imports(text: str) -> Iterator[str]:
    """Yield dotted names; `from a import b` gives "a.b", for b may be a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they go"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def cython_imports(text: str) -> Iterator[str]:
    """The same for Cython, by pattern: strings and comments are taken out first."""
    text = re.sub(r'""".*?"""|#[^\n]*', "", text, flags=re.DOTALL)
    for match in _CYTHON_IMPORT.finditer(text):
        names = (match["plain"] or match["names"]).strip("()").split(",")
        names = [name.split()[0] for name in names if name.strip()]
        base = match["base"]
        assert base is None or not base.startswith("."), "relative imports hide where they go"
        yield from (name if base is None else f"{base}.{name}" for name in names)


def unit_of(path: Path) -> str:
    """Name the table row of a file: its module, or the package below the top that it lies in."""
    parts = path.relative_to(ROOT).parts
    return parts[1].split(".")[0]


def target_of(name: str, package: str, units: set[str]) -> str:
    """Name what an imported dotted name belongs to, in the table's words."""
    top, *rest = name.split(".")
    if top == package:
        if rest and rest[0] in units:
            return rest[0]
        return "face" if top == "fastcache" else top
    if top in sys.stdlib_module_names:
        return "std"
    return top


def files_of(package: str) -> list[Path]:
    return sorted(path for kind in ("py", "pyx", "pxd") for path in (ROOT / package).rglob(f"*.{kind}"))


@pytest.mark.parametrize(("package", "table"), [("fastcache", FASTCACHE), ("fastcache_ext", EXT)])
def test_imports_go_down_only(package: str, table: dict[str, str]) -> None:
    files = files_of(package)
    units = {unit_of(path) for path in files}
    assert units <= table.keys(), f"a new unit needs a row in this table: {units - table.keys()}"
    wrong = []
    for path in files:
        unit = unit_of(path)
        allowed = EVERYWHERE[package] | set(table[unit].split()) | {unit}
        names = python_imports(path.read_text()) if path.suffix == ".py" else cython_imports(path.read_text())
        targets = {target_of(name, package, units) for name in names}
        wrong += [f"{path.relative_to(ROOT)} imports {target}" for target in sorted(targets - allowed)]
    assert not wrong


@pytest.mark.parametrize("table", [FASTCACHE, EXT], ids=["fastcache", "fastcache_ext"])
def test_the_table_itself_has_no_cycle(table: dict[str, str]) -> None:
    graph = {unit: set(below.split()) & table.keys() for unit, below in table.items()}
    if table is EXT:  # two headers stand below what their modules call
        graph["policy"].clear()  # the registry knows the policies, they know the interface
        graph["waiting"].discard("monitor")
        graph["room"].discard("monitor")
        graph["landing"].discard("monitor")  # landing knows the monitor's structs, the monitor calls landing
    graphlib.TopologicalSorter(graph).prepare()


def test_numpy_headers_are_known_to_views_only() -> None:
    knows = {
        path.stem for path in files_of("fastcache_ext") if re.search(r"numpy/\w+\.h|cimport numpy", path.read_text())
    }
    assert knows <= {"views"}


def test_imports_are_found_in_python_and_in_cython() -> None:
    assert list(python_imports("import a.b, c\ndef f():\n    from d.e import f, g")) == ["a.b", "c", "d.e.f", "d.e.g"]
    text = '"""from zero import it\n"""\nfrom a.b cimport (c,\n d)  # from e cimport f\ncimport g as h\nimport i, j\n'
    assert list(cython_imports(text)) == ["a.b.c", "a.b.d", "g", "i", "j"]


def test_no_file_is_two_nouns() -> None:
    folders = ("fastcache", "fastcache_ext", "tests", "bench", "examples")
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in folders
        for path in files_of(folder)
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long
