# When each layer is expected to be visited again, from how it came round so far. The unit of time is a visit of any layer.
from libc.stdint cimport int32_t, int64_t, uint32_t

cdef enum:
    FC_GAPS = 64            # classes of gaps: four to an octave, and one for all above 114,688 visits

ctypedef struct fc_round:   # of one layer
    int64_t last            # its last visit
    double mean             # of its gaps, over about the last 128
    double back             # the visit at which it is expected again
    double gap              # expected mean of its gaps from then on
    uint32_t visits

ctypedef struct fc_rounds:
    int32_t n_layers
    int64_t now             # visits of all layers
    int64_t look_at         # when all layers are looked at next
    int32_t left            # layer of the last visit, or -1
    fc_round *layers        # [n_layers]
    int64_t counted
    double count[FC_GAPS]   # gaps of all layers, older ones for less
    double sum[FC_GAPS]
    double longer[FC_GAPS + 1]      # count and sum of a class and above, when last looked at
    double lasted[FC_GAPS + 1]

cdef int rounds_init(fc_rounds *r, int32_t n_layers) noexcept nogil         # 0 or -ENOMEM
cdef void rounds_free(fc_rounds *r) noexcept nogil
cdef void rounds_visit(fc_rounds *r, int32_t layer) noexcept nogil          # one begins
# Expect all layers anew, now and then: whether it was time to. O(n_layers) once in so many visits or more.
cdef bint rounds_look(fc_rounds *r) noexcept nogil
