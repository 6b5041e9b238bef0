"""Arrays over a lease, through NumPy's C API.

Owns Catalog (where each tensor of each expert lies in its slot, and which labels show it) and ExpertLease.
Every array's base is the Hold, so the slot stays leased for as long as the array, or anything made from it, lives.
May import hold and numpy.
"""
cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_FillInfo
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

import sys

cimport numpy as cnp
import numpy as np

from fastcache_ext.arena cimport fork_word
from fastcache_ext.hold cimport Hold
from fastcache_ext.sealed cimport seal

cnp.import_array()

cdef const int32_t *FORKS = fork_word()

cdef extern from *:
    """
    #include <numpy/arrayobject.h>
    /* a read-only array over memory that `base` keeps; both references that NumPy steals are taken here */
    static CYTHON_INLINE PyObject *fc_array(PyObject *descr, int nd, const Py_ssize_t *shape, const Py_ssize_t *strides,
                                            void *data, PyObject *base) {
        PyObject *a;
        Py_INCREF(descr);
        a = PyArray_NewFromDescr(&PyArray_Type, (PyArray_Descr *)descr, nd, (const npy_intp *)shape,
                                 (const npy_intp *)strides, data, strides ? 0 : NPY_ARRAY_CARRAY_RO, NULL);
        if (!a) return NULL;
        Py_INCREF(base);
        ((PyArrayObject_fields *)a)->base = base;       /* PyArray_SetBaseObject for an array that nobody has seen */
        return a;
    }
    """
    object fc_array(PyObject *descr, int nd, const Py_ssize_t *shape, const Py_ssize_t *strides, void *data, PyObject *base)


cdef class Catalog:
    """Where every tensor of every expert lies in its slot, and which labels show it.

    Parameters
    ----------
    records : sequence of (labels, refused, tensor_bytes)
        `labels`: sequence of (label, tensor, delta, dtype, shape, strides); `refused`: {label: why};
        `tensor_bytes`: bytes of each stored tensor, in the order of the lease's own buffer.
    record_of : uint16 array [n_keys]
    offsets : int64 array [n_keys, n_tensors]
        Bytes from the slot's first byte.
    key_type, released_error, forked_error : types
        What `lease.key` is made of, what a released lease raises, and what one raises in a forked child.
    """

    def __cinit__(self, records, record_of, offsets, key_type, released_error, forked_error=RuntimeError):
        cdef int32_t r, t, i = 0, d
        cdef int64_t n
        cdef const int64_t[:, ::1] where = np.ascontiguousarray(offsets, np.int64)
        cdef const uint16_t[::1] which = np.ascontiguousarray(record_of, np.uint16)
        self.n_records = len(records)
        self.n_labels = sum(len(labels) for labels, _, _ in records)
        self.n_tensors = where.shape[1]
        self.labels = <fc_label *>calloc(self.n_labels + 1, sizeof(fc_label))
        self.tensor_bytes = <int64_t *>calloc(self.n_records * self.n_tensors + 1, sizeof(int64_t))
        self.record_bytes = <int64_t *>calloc(self.n_records + 1, sizeof(int64_t))
        self.tensor_count = <int32_t *>calloc(self.n_records + 1, sizeof(int32_t))
        self.first = <int32_t *>calloc(self.n_records + 1, sizeof(int32_t))
        self.offsets = <int64_t *>calloc(where.shape[0] * where.shape[1] + 1, sizeof(int64_t))
        self.record_of = <uint16_t *>calloc(which.shape[0] + 1, sizeof(uint16_t))
        if (self.labels == NULL or self.tensor_bytes == NULL or self.record_bytes == NULL or self.tensor_count == NULL
                or self.first == NULL or self.offsets == NULL or self.record_of == NULL):
            raise MemoryError
        n = where.shape[0] * where.shape[1]
        if n > 0:
            memcpy(self.offsets, &where[0, 0], <size_t>n * sizeof(int64_t))
        if which.shape[0] > 0:
            memcpy(self.record_of, &which[0], <size_t>which.shape[0] * sizeof(uint16_t))
        self.index, self.refused = [], []
        self.key_type, self.released_error, self.forked_error = key_type, released_error, forked_error
        for r in range(self.n_records):
            labels, refused, sizes = records[r]
            self.tensor_count[r] = len(sizes)
            for t in range(len(sizes)):
                self.tensor_bytes[r * self.n_tensors + t] = sizes[t]
                self.record_bytes[r] += self.tensor_bytes[r * self.n_tensors + t]
            index = {}
            for label, tensor, delta, dtype, shape, strides in labels:
                if len(shape) > FC_MAX_DIMS or len(shape) != len(strides):
                    raise ValueError(f"{label!r}: at most {FC_MAX_DIMS} dimensions, one stride each")
                self.labels[i].tensor = tensor
                self.labels[i].delta = delta
                self.labels[i].nd = len(shape)
                for d in range(len(shape)):
                    self.labels[i].shape[d] = shape[d]
                    self.labels[i].strides[d] = strides[d]
                dtype = np.dtype(dtype)
                step, self.labels[i].packed = dtype.itemsize, 1
                for d in range(len(shape) - 1, -1, -1):
                    self.labels[i].packed &= strides[d] == step
                    step *= shape[d]
                Py_INCREF(dtype)
                self.labels[i].descr = <PyObject *>dtype
                label = sys.intern(label)
                index[label] = i
                self.labels[i].name = <PyObject *>label
                i += 1
            self.first[r + 1] = i
            self.index.append(index)
            self.refused.append(dict(refused))

    def __dealloc__(self):
        cdef int32_t i
        if self.labels != NULL:
            for i in range(self.n_labels):
                if self.labels[i].descr != NULL:
                    Py_DECREF(<object>self.labels[i].descr)
        free(self.labels)
        free(self.tensor_bytes)
        free(self.record_bytes)
        free(self.tensor_count)
        free(self.first)
        free(self.offsets)
        free(self.record_of)


cdef ExpertLease make_lease(Catalog catalog, Hold hold, int32_t dense_key, int32_t layer, int32_t expert):
    cdef ExpertLease lease = ExpertLease.__new__(ExpertLease)
    lease.catalog = catalog
    lease._hold = hold
    lease.dense_key = dense_key
    lease.layer = layer
    lease.expert = expert
    lease.generation = hold.generation
    return lease


@cython.final
@cython.no_gc
@cython.freelist(256)
cdef class ExpertLease:
    """An expert, held: a mapping from label to read-only array, zero-copy over the expert's slot.

    The slot is leased for as long as this object, or any array, slice, memoryview or DLPack capsule made from it, lives.
    `release()` and leaving a `with` block give up this object's own hold; arrays made before stay valid.
    Two leases are equal only if they are the same object. A lease cannot be pickled.

    Thread-safe. A raw address (``array.ctypes.data``) holds nothing.
    """

    cdef object array(self, int32_t label):
        cdef fc_label *l = &self.catalog.labels[label]
        cdef uint8_t *data = self._hold.data + self.catalog.offsets[<int64_t>self.dense_key * self.catalog.n_tensors + l.tensor]
        return fc_array(l.descr, l.nd, l.shape, NULL if l.packed else l.strides, data + l.delta, <PyObject *>self._hold)

    cdef int live(self) except -1:
        if self.released:
            raise self.catalog.released_error(
                f"the lease of layer {self.layer} expert {self.expert} was released; acquire the expert again")
        if self._hold.arena.fork_gen != FORKS[0]:
            raise self.catalog.forked_error(
                f"the lease of layer {self.layer} expert {self.expert} belongs to the process before the fork, and its memory "
                "is not mapped in this one: reopen() the store and acquire the expert again")
        return 0

    cdef dict labels(self):
        return <dict>self.catalog.index[self.catalog.record_of[self.dense_key]]

    def __getitem__(self, label):
        cdef int32_t r = self.catalog.record_of[self.dense_key], i
        if self.released or self._hold.arena.fork_gen != FORKS[0]:
            self.live()                 # says which
        for i in range(self.catalog.first[r], self.catalog.first[r + 1]):   # a literal in the caller's code is the interned one
            if self.catalog.labels[i].name == <PyObject *>label:
                return self.array(i)
        return self.look_up(label)

    cdef object look_up(self, object label):
        cdef dict labels = self.labels()
        cdef PyObject *found = PyDict_GetItemWithError(labels, label)
        if found == NULL:
            why = self.catalog.refused[self.catalog.record_of[self.dense_key]].get(label)
            raise KeyError(why if why is not None else
                           f"{label!r} is no tensor of layer {self.layer} expert {self.expert}; there are {', '.join(labels)}")
        return self.array(<object>found)

    def get(self, label, default=None):
        """Return the array of `label`, or `default`."""
        return self[label] if label in self.labels() else default

    def __iter__(self):
        return iter(self.labels())

    def __len__(self):
        return len(self.labels())

    def __contains__(self, label):
        return label in self.labels()

    def keys(self):
        """Labels, in order."""
        return self.labels().keys()

    def values(self):
        """Arrays, in the order of the labels."""
        return [self[label] for label in self.labels()]

    def items(self):
        """(label, array) pairs."""
        return [(label, self[label]) for label in self.labels()]

    @property
    def key(self):
        """ExpertKey of the expert."""
        return self.catalog.key_type(self.layer, self.expert)

    @property
    def nbytes(self):
        """Payload bytes of the expert, without padding."""
        return self.catalog.record_bytes[self.catalog.record_of[self.dense_key]]

    @property
    def contiguous(self):
        """Whether the expert's tensors lie side by side, so that the lease's own buffer needs no copy."""
        cdef Catalog c = self.catalog
        cdef int32_t r = c.record_of[self.dense_key], t
        cdef int64_t *at = c.offsets + <int64_t>self.dense_key * c.n_tensors
        for t in range(1, c.tensor_count[r]):
            if at[t] != at[t - 1] + c.tensor_bytes[r * c.n_tensors + t - 1]:
                return False
        return True

    def release(self):
        """Give up this handle's hold. Idempotent. Arrays made from the lease stay valid; new ones raise LeaseReleased."""
        self.released = True
        if not self.exported:
            self._hold = None

    def __enter__(self):
        self.live()
        return self

    def __exit__(self, *exc):
        self.release()

    def copy(self):
        """Return {label: array}, owned and writable, independent of the lease."""
        return {label: np.array(self[label], order="K") for label in self.labels()}

    cdef object flatten(self):
        cdef Catalog c = self.catalog
        cdef int32_t r = c.record_of[self.dense_key], t
        cdef int64_t n, done = 0
        cdef const int64_t *at = c.offsets + <int64_t>self.dense_key * c.n_tensors
        cdef bytearray out = bytearray(c.record_bytes[r])
        for t in range(c.tensor_count[r]):
            n = c.tensor_bytes[r * c.n_tensors + t]
            memcpy(<char *>out + done, self._hold.data + at[t], <size_t>n)
            done += n
        c.copies += 1
        return bytes(out)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef Catalog c = self.catalog
        cdef void *start
        self.live()
        if flags & PyBUF_WRITABLE:
            raise BufferError("an expert's bytes are read-only; lease.copy() gives owned, writable arrays")
        # From here on this object keeps its Hold: some consumers give the export back at once and keep only the object.
        self.exported = True
        if self.contiguous:
            start = self._hold.data + c.offsets[<int64_t>self.dense_key * c.n_tensors] if c.n_tensors > 0 else self._hold.data
        else:
            if self.flat is None:
                self.flat = self.flatten()
            start = <void *><const char *><bytes>self.flat
        PyBuffer_FillInfo(buffer, self, start, self.nbytes, 1, flags)

    def __reduce_ex__(self, protocol):
        raise TypeError("an ExpertLease cannot be pickled or copied: it refers to memory of an open store. "
                        "Use lease.copy() for the arrays, or reopen the store and acquire the expert there")

    def __repr__(self):
        state = "released" if self.released else f"{self.nbytes} bytes, generation {self.generation}"
        return f"<ExpertLease layer {self.layer} expert {self.expert}: {', '.join(self.labels())}; {state}>"


seal(ExpertLease)
