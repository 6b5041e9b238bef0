"""What a caller gave, where a key is wanted: its two parts, a number, or words for an error.

May import nothing of the package.
"""
from cpython.exc cimport PyErr_Clear, PyErr_ExceptionMatches, PyErr_Occurred

import reprlib

cdef extern from *:
    Py_ssize_t clipped "PyNumber_AsSsize_t" (object number, void *overflow) noexcept        # NULL: clip; -1 with an error set


cdef str shown(object given):
    """What a caller gave, as an error names it: shortened, with its type."""
    return f"{reprlib.repr(given)} ({type(given).__name__})"


cdef bint is_flag(object given) except -1:
    """Whether it is True or False, Python's or NumPy's: 1 and 0 to index() and float(), and hardly meant so."""
    return isinstance(given, bool) or getattr(getattr(given, "dtype", None), "kind", None) == "b"


cdef Py_ssize_t number(object given, str what) except? -1:
    """An integer, at most what the machine has; a TypeError says what was given instead, True and False too."""
    cdef Py_ssize_t value
    if not isinstance(given, bool):
        value = clipped(given, NULL)
        if value != -1 or PyErr_Occurred() == NULL or not PyErr_ExceptionMatches(TypeError):
            return value                # any other error is the caller's own
        PyErr_Clear()
    many = isinstance(given, (list, tuple, set, range, slice)) or getattr(given, "ndim", 0) > 0
    hint = "; acquire_many(layer, experts) takes several" if what == "expert" and many else ""
    raise TypeError(f"{what} must be an integer; got {shown(given)}{hint}")


cdef tuple key_parts(object key):
    if isinstance(key, (str, bytes)) or not hasattr(key, "__iter__"):
        raise TypeError(f"give layer and expert, two integers, or an ExpertKey; got {shown(key)}")
    parts = tuple(key)
    if len(parts) != 2:
        raise TypeError(f"give layer and expert, two integers, or an ExpertKey; got {len(parts)} in {shown(key)}")
    return parts
