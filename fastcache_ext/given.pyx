"""What a caller gave, where a key is wanted: its two parts, or words for an error.

May import nothing of the package.
"""
import reprlib


cdef str shown(object given):
    """What a caller gave, as an error names it: shortened, with its type."""
    return f"{reprlib.repr(given)} ({type(given).__name__})"


cdef tuple key_parts(object key):
    if isinstance(key, (str, bytes)) or not hasattr(key, "__iter__"):
        raise TypeError(f"give layer and expert, two integers, or an ExpertKey; got {shown(key)}")
    parts = tuple(key)
    if len(parts) != 2:
        raise TypeError(f"give layer and expert, two integers, or an ExpertKey; got {len(parts)} in {shown(key)}")
    return parts
