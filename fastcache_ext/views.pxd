# What the bytes of an expert mean to NumPy: labelled arrays over a Hold. The one module that knows NumPy.
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint16_t

from fastcache_ext.hold cimport Hold

cdef enum:
    FC_MAX_DIMS = 8

ctypedef struct fc_label:       # one label of a record: an array over (part of) a stored tensor
    int32_t tensor              # which stored tensor
    int32_t nd
    int32_t packed              # 1: C-contiguous, so that NumPy need not work out the flags
    int64_t delta               # bytes from the tensor's first byte
    PyObject *name              # the label, interned; `index` keeps it
    PyObject *descr             # owned reference to the dtype
    Py_ssize_t shape[8]
    Py_ssize_t strides[8]       # bytes

cdef class Catalog:
    cdef fc_label *labels
    cdef int32_t n_labels
    cdef int32_t n_records
    cdef int32_t n_tensors      # most tensors of any record
    cdef int64_t *tensor_bytes  # [n_records * n_tensors]
    cdef int64_t *record_bytes  # [n_records] payload
    cdef int32_t *tensor_count  # [n_records]
    cdef int32_t *first         # [n_records + 1] labels of record r: [first[r], first[r + 1])
    cdef int64_t *offsets       # [n_keys * n_tensors] bytes from the slot's start
    cdef uint16_t *record_of    # [n_keys]
    cdef list index             # per record: {label: index into labels}
    cdef list refused           # per record: {label: why}
    cdef object key_type        # ExpertKey
    cdef object released_error  # type of the error for a released lease
    cdef object forked_error    # and for one that is used in a forked child, where its memory is not mapped
    cdef readonly int64_t copies    # exports that had to copy, because the tensors do not lie side by side

cdef class ExpertLease:
    cdef Hold _hold             # None once released, unless exported
    cdef Catalog catalog
    cdef object flat            # bytes: the copy behind the lease's own buffer, where one was needed
    cdef int32_t dense_key
    cdef int32_t layer
    cdef int32_t expert
    cdef bint released
    cdef bint exported          # gave its own buffer: keeps its Hold until it goes
    cdef readonly int64_t generation

    cdef object array(self, int32_t label)
    cdef object look_up(self, object label)
    cdef int live(self) except -1
    cdef dict labels(self)
    cdef object flatten(self)

cdef ExpertLease make_lease(Catalog catalog, Hold hold, int32_t dense_key, int32_t layer, int32_t expert)
