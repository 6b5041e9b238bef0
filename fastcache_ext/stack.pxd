# LRU stack distances: how many different experts were asked for since an expert was last asked for, itself included. One pass
# gives the hits of LRU at every size.
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t

cdef enum:
    STACK_MAX_KEYS = 30000  # times are 16 bits wide

ctypedef struct fc_stack:
    int32_t n_keys
    int32_t n_times         # places on the line of times: at least twice the keys
    int32_t now             # the next place
    int32_t distinct        # keys that have been asked for
    uint16_t *time_of       # [n_keys] place of the last request, or 0
    uint16_t *key_at        # [n_times + 1] 1 + key whose last request stands there, or 0
    uint16_t *tree          # [n_times + 1] Fenwick tree over the places that are taken
    uint32_t *hist          # [n_keys + 1] requests by distance; 0: first ones
    int64_t requests        # of those counted in `hist`

cdef int stack_init(fc_stack *s, int32_t n_keys) noexcept nogil        # 0 or -ENOMEM
cdef void stack_destroy(fc_stack *s) noexcept nogil
cdef int32_t stack_ask(fc_stack *s, int32_t key) noexcept nogil        # the distance, counted; 0 for a first request
cdef void stack_halve(fc_stack *s) noexcept nogil                      # older traffic counts half
