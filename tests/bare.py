"""Use up what can be made of a compiled class alone, or call a module's functions: python bare.py MODULE [CLASS].

With the module "store": call everything of a store, closed and open, with what it does not expect.

The last line says "gone"; where a crash ends the process, it is the call that crashed.
"""

import copy
import faulthandler
import gc
import pickle
import sys
from importlib import import_module

import fastcache
from fastcache_ext.serve import Server


class Odd:
    """An integer and a sequence, to whoever asks."""

    def __index__(self):
        return 0

    def __iter__(self):
        return iter([0])


def arguments():
    yield from [(), (0,), (1,), (None,), ("a",), ("lru",), (b"",), ([],), ((0, 0),), (Odd(),), (Server(),)]
    yield from [(0, 0), (0, [0]), (0, "lru"), (None, 0), (Server(), 0), (Server(), "lru"), (b"", 0)]
    yield from [(b"", b"", []), (b"", b"", b"", [], "lru"), *((0,) * n for n in range(3, 8))]


def used(what, call, *args):
    print(what, [type(each).__name__ for each in args], flush=True)
    try:
        result = call(*args)
        if hasattr(result, "__next__"):
            next(result, None)
    except SystemError:  # an exception that was not set, or was left behind
        raise
    except Exception:
        return


def bare(each):
    """Whatever can be had of a class without saying what it is to hold."""
    for new in (
        each,
        lambda: each.__new__(each),
        lambda: object.__new__(each),
        lambda: copy.copy(each.__new__(each)),
        lambda: type("Sub", (each,), {})(),
    ):
        try:
            yield new()
        except TypeError as error:
            print("refused:", error, flush=True)


USES = {
    "repr": repr,
    "len": len,
    "bool": bool,
    "hash": hash,
    "memoryview": memoryview,
    "bytes": bytes,
    "dict": dict,
    "list": lambda thing: [x for x, _ in zip(thing, range(3), strict=False)],
    "in": lambda thing: 0 in thing,
    "eq": lambda thing: thing == thing,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


def use_up(each):
    for thing in bare(each):
        for what, use in USES.items():
            used(what, use, thing)
        for name in sorted({*dir(each)} - {"__class__", "__init_subclass__", "__subclasshook__", "__new__"}):
            used(f"get {name}", getattr, thing, name)
            method = getattr(each, name, None)
            for args in arguments() if callable(method) else ():
                used(name, lambda *args, thing=thing, name=name: getattr(thing, name)(*args), *args)
            used(f"set {name}", setattr, thing, name, None)
        for what, use in USES.items():
            used(f"{what} again", use, thing)
    for args in arguments():  # what there is when the making fails goes too
        used("of", each, *args)


def call_all(module):
    for name, function in sorted(vars(module).items()):
        if type(function).__name__ in ("builtin_function_or_method", "cython_function_or_method"):
            for args in arguments():
                used(name, function, *args)


def call_store(closed):
    with fastcache.open(fastcache.MemorySource({(0, 0): b"abc"})) as store:
        if closed:
            store.close()
        for name in sorted({*dir(Server)} - {"__class__", "__init_subclass__", "__subclasshook__", "__new__", "_shut"}):
            if callable(getattr(store, name)):
                for args in arguments():
                    used(name, getattr(store, name), *args)


if __name__ == "__main__":
    faulthandler.enable()
    if sys.argv[1] == "store":
        call_store(closed=True)
        call_store(closed=False)
        print("gone", flush=True)
        sys.exit()
    found = import_module(f"fastcache_ext.{sys.argv[1]}")
    if sys.argv[2:]:
        use_up(getattr(found, sys.argv[2]))
    else:
        call_all(found)
    print("going", flush=True)
    gc.collect()
    print("gone", flush=True)
