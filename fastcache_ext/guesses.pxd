from fastcache_ext.lender cimport Lender

cdef class Guesser(Lender):
    cdef dict names             # of predictors -> number in the evidence
    cdef object naming          # guards it
    cdef int stops              # reads that the kernel was asked to stop, as last seen

    cdef int predictor(self, object name) except -1
