"""Build the compiled half: every ``fastcache_ext/*.pyx`` is one extension module.

Everything else about the distribution is in pyproject.toml.
FASTCACHE_BUILD=asan|tsan|debug adds that instrumentation (see ci/asan.sh); quick leaves optimisation out.
FASTCACHE_BUILD_JOBS: how many files are translated at once (default: as many as there are processors, at most 8).
"""

import multiprocessing
import os
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

PACKAGE = Path("fastcache_ext")
FLAGS = {
    "": ["-O2", "-g1"],  # -g1: lines for backtraces; variables would take a fifth of the compiler's time
    "quick": ["-O0", "-g0"],
    "debug": ["-O1", "-g", "-DFC_CHECK=1"],
    "asan": ["-O0", "-g1", "-DFC_CHECK=1", "-fsanitize=address", "-fno-omit-frame-pointer"],
    "tsan": ["-O1", "-g1", "-fsanitize=thread", "-Wno-tsan"],
}
WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-unused-function", "-Wno-missing-field-initializers"]


# Translators are forked: a process that starts afresh would run this file again.
JOBS = min(8, os.cpu_count() or 1) if multiprocessing.get_start_method() == "fork" else 0


def extension(source: Path) -> Extension:
    kind = os.environ.get("FASTCACHE_BUILD", "")
    sanitize = [flag for flag in FLAGS[kind] if flag.startswith("-fsanitize")]
    werror = ["-Werror"] if os.environ.get("FASTCACHE_WERROR") else []
    uses_numpy = source.stem == "views"
    return Extension(
        f"fastcache_ext.{source.stem}",
        [str(source)],
        extra_compile_args=["-std=gnu11", "-ffp-contract=off", *WARNINGS, *werror, *FLAGS[kind]],
        extra_link_args=["-pthread", "-ldl", *sanitize],
        include_dirs=[numpy.get_include()] if uses_numpy else [],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")] if uses_numpy else [],
    )


setup(
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
