# The border to Python: a store without meaning.
from libc.stdint cimport int32_t, int64_t

from fastcache_ext.arena cimport fc_arena
from fastcache_ext.files cimport FileSet
from fastcache_ext.ioqueue cimport fc_port
from fastcache_ext.monitor cimport fc_core, fc_node
from fastcache_ext.pread cimport fc_pread
from fastcache_ext.recorder cimport fc_recorder
from fastcache_ext.uring cimport fc_uring
from fastcache_ext.worker cimport fc_worker

cdef class Core:
    cdef fc_core *c
    cdef fc_uring *ring
    cdef fc_pread *pread
    cdef fc_worker *worker          # owned; leaked with the core when a thread does not end
    cdef FileSet fileset
    cdef object tape                # the last recording's Tape: it owns what the next line points to
    cdef fc_recorder *recorder      # or NULL: not joined yet
    cdef int32_t *layer_index       # [max_layer + 1] index of a layer, or -1
    cdef int32_t max_layer
    cdef int32_t n_layers
    cdef int32_t *layer_first       # [n_layers + 1]
    cdef int32_t *layer_number      # [n_layers] as the checkpoint numbers them
    cdef double timeout             # seconds, < 0: none
    cdef bint shutting              # close() has begun: what the kernel gave is in `last`
    cdef bint stopping              # a thread is inside _stop()
    cdef bint closed
    cdef dict last                  # memory as it was at close
    cdef readonly str engine_used
    cdef readonly str engine_reason     # why it is not the one that was preferred

    cdef int32_t key(self, object layer, object expert) except -1
    cdef int same_process(self) except -1
    cdef int check(self) except -1
    cdef bint forked(self) noexcept
    cdef object failure(self, const fc_node *node)
    cdef int _make(self, fc_arena *arena, bytes cls_of, bytes first, bytes extents, bytes span, int policy, int n_ops,
                   int64_t chunk) except -1
    cdef int _haunt(self, bint choosing) except -1
    cdef int _start(self, fc_port *port, str engine, int queue_depth, int io_threads) except -1
    cdef bint _stop(self, int64_t timeout_ns)
