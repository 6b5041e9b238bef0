# A cache that holds nothing: one policy over a sample of the experts, to learn what it would have hit. It runs the code of
# policy.pxd over a view of its own, whose leases are those of the visit being served.
from libc.stdint cimport int32_t, int64_t, uint8_t

from fastcache_ext.policy cimport fc_policy

cdef enum:
    GHOST_CLASSES = 16

ctypedef struct fc_shape:       # what the ghosts of one store share; the last four are theirs in turn, and zero in between
    int32_t n_layers
    int32_t n_keys          # sampled experts; layer l's mark is key n_keys + l
    int32_t n_classes
    int32_t n_slots
    int32_t *layer_first    # [n_layers + 1] sampled experts of layer l: [layer_first[l], layer_first[l + 1])
    int32_t *layer_of       # [n_keys + n_layers]
    uint8_t *cls_of         # [n_keys]
    int32_t class_first[17]     # slots of class c: [class_first[c], class_first[c + 1])
    int32_t *capacity       # [16] slots of a class
    uint8_t *cls            # [n_slots]
    uint8_t *unread         # [n_slots] zero
    int32_t *leases         # [n_slots]
    uint8_t *parked         # [n_slots]
    int32_t *held           # [n_slots] slots that the visit holds

ctypedef struct fc_ghost:
    fc_policy policy
    const fc_shape *shape
    int32_t *slot_of        # [n_keys + n_layers] slot or -1
    int32_t *key_of         # [n_slots] key or -1
    int32_t filled[16]      # slots of a class that have held anything
    int64_t evictions

# `sampled` experts of `keys` per class stand for the store's `slots`; arrays [n_classes]. 0 or -ENOMEM.
cdef int shape_init(fc_shape *s, int32_t n_layers, const int32_t *per_layer, int32_t n_classes, const int32_t *slots,
                    const int32_t *keys, const int32_t *sampled) noexcept nogil
cdef void shape_destroy(fc_shape *s) noexcept nogil
cdef int ghost_init(fc_ghost *g, const fc_shape *shape, int kind) noexcept nogil       # 0 or -errno
cdef void ghost_destroy(fc_ghost *g) noexcept nogil
# One visit of a layer, as a batch: what is here is held first. `keys`: the sampled ones of its experts, distinct, in request
# order. hits[i] becomes 1 where keys[i] was here, else 0. Returns the hits.
cdef int ghost_visit(fc_ghost *g, int32_t layer, const int32_t *keys, int n, uint8_t *hits) noexcept nogil
# 0, or what does not hold.
cdef int ghost_check(const fc_ghost *g) noexcept nogil
