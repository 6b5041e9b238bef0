# What a caller gave, where a key is wanted.
cdef str shown(object given)
# The two parts of an ExpertKey, or a TypeError that says what was given instead.
cdef tuple key_parts(object key)
