"""Build the compiled half: every ``fastcache_ext/*.pyx`` is one extension module.

Everything else about the distribution is in pyproject.toml.
FASTCACHE_BUILD=asan|tsan|debug adds that instrumentation (see ci/asan.sh); quick leaves optimisation out. The module
`built` says which it was; what was built with other flags than the present ones is built anew.
FASTCACHE_BUILD_JOBS: how many files are translated at once (default: as many as there are processors, at most 8).
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGE = Path("fastcache_ext")
FLAGS = {
    "release": ["-O2", "-g1"],  # -g1: lines for backtraces; variables would take a fifth of the compiler's time
    "quick": ["-O0", "-g0"],
    "debug": ["-O1", "-g", "-DFC_CHECK=1"],
    "asan": ["-O0", "-g1", "-DFC_CHECK=1", "-fsanitize=address", "-fno-omit-frame-pointer"],
    "tsan": ["-O1", "-g1", "-fsanitize=thread", "-Wno-tsan"],
}
BASE = ["-std=gnu11", "-ffp-contract=off"]
WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-unused-function", "-Wno-missing-field-initializers"]


# Translators are forked: a process that starts afresh would run this file again.
JOBS = min(8, os.cpu_count() or 1) if multiprocessing.get_start_method() == "fork" else 0


def extension(source: Path) -> Extension:
    kind = os.environ.get("FASTCACHE_BUILD") or "release"
    if kind not in FLAGS:
        raise SystemExit(f"FASTCACHE_BUILD={kind}: one of {', '.join(FLAGS)}")
    sanitize = [flag for flag in FLAGS[kind] if flag.startswith("-fsanitize")]
    werror = ["-Werror"] if os.environ.get("FASTCACHE_WERROR") else []
    uses_numpy = source.stem == "views"
    macros = [("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")] if uses_numpy else []
    if source.stem == "built":
        flags = " ".join([*os.environ.get("CFLAGS", "").split(), *BASE, *FLAGS[kind]])
        macros = [("FC_BUILD_KIND", json.dumps(kind)), ("FC_BUILD_FLAGS", json.dumps(flags))]
    return Extension(
        f"fastcache_ext.{source.stem}",
        [str(source)],
        extra_compile_args=[*BASE, *WARNINGS, *werror, *FLAGS[kind]],
        extra_link_args=["-pthread", "-ldl", *sanitize],
        include_dirs=[numpy.get_include()] if uses_numpy else [],
        define_macros=macros,
    )


class BuildExt(build_ext):
    """Builds all anew when what is there was made with other flags: it may well be newer than its sources.

    The flags are written down beside the objects, and beside the modules of a build in place.
    """

    def run(self):
        """Build; until all is there, nothing says how it was built."""
        flags = {repr((e.extra_compile_args, e.extra_link_args, e.define_macros)) for e in self.extensions}
        variables = [f"{name}={os.environ.get(name, '')}" for name in ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS")]
        now = "\n".join([*sorted(flags), *variables])
        places = [Path(self.build_temp), *([PACKAGE] if self.inplace else [])]
        stamps = [place / f".built-with-{sys.implementation.cache_tag}" for place in places]
        if [stamp.read_text() if stamp.exists() else "" for stamp in stamps] != [now] * len(stamps):
            self.force = True
        for stamp in stamps:
            stamp.unlink(missing_ok=True)
        super().run()
        for stamp in stamps:
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.write_text(now)


setup(
    cmdclass={"build_ext": BuildExt},
    options={"build_ext": {"parallel": os.cpu_count()}},
    ext_modules=cythonize(
        [extension(source) for source in sorted(PACKAGE.glob("*.pyx"))],
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "initializedcheck": False,
            "cdivision": True,
            "legacy_implicit_noexcept": False,
            "embedsignature": True,
        },
        nthreads=int(os.environ.get("FASTCACHE_BUILD_JOBS") or JOBS),
    ),
)
