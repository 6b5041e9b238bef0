# What a caller gave, where a key is wanted.
cdef str shown(object given)
cdef bint is_flag(object given) except -1
# An integer, clipped to Py_ssize_t, or a TypeError that says what `what` is instead.
cdef Py_ssize_t number(object given, str what) except? -1
# The two parts of an ExpertKey, or a TypeError that says what was given instead.
cdef tuple key_parts(object key)
