# What became of guesses, per predictor, and from that whether more of them are let in. Pure: no clock, no lock, no read; times
# are given, and the store's mutex is held by whoever calls.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

cdef enum:
    EV_PREDICTORS = 64      # names a store can tell apart
    EV_CALLER = 0           # a prefetch without a name
    EV_PIN = 1              # pins read like prefetches: counted here, never judged
    EV_WARM = 2             # a readiness gate is no speculation: counted, never judged

cdef enum:                  # what was asked for
    EV_AUTO = 0
    EV_ALWAYS = 1           # nothing is declined
    EV_OFF = 2              # every guess is declined

cdef enum:                  # the verdict on one predictor
    EV_FULL = 0
    EV_NARROWED = 1         # the first half of each call
    EV_STOPPED = 2          # a few probes now and then

cdef enum:
    E_ISSUED = 0            # == used + late + wasted + cancelled + failed + unread + in_flight
    E_USED                  # resident when the first demand came
    E_LATE                  # joined by a demand before it had landed
    E_WASTED                # evicted unread
    E_CANCELLED
    E_FAILED
    E_UNREAD                # gauge: resident, not used yet
    E_IN_FLIGHT             # gauge
    E_MISSED                # its layer was visited without it; it may still be used, so these are among the others
    E_DISPLACED             # demand reads of experts that one of its guesses had evicted
    E_DECLINED              # not let in: nothing was read
    E_BYTES                 # payload of those that landed
    E_LATE_WAIT_NS          # how long the late joins waited
    E_CHARGED_WAIT_NS       # how long demands waited while its guesses kept the device busy
    N_EVIDENCE

ctypedef struct fc_predictor:
    int64_t count[14]       # E_*
    double n                # what follows is remembered from about the last 64 resolved guesses
    double hits             # guesses that were used, or came late
    double gain_ns          # waits that they saved
    double waste_ns         # device time spent on the others
    double loss_ns          # waits charged and reads displaced: lost in so far as guesses are wrong, moved elsewhere where right
    int32_t resolved        # guesses since it began, or since the last probe did
    int32_t state           # EV_FULL, EV_NARROWED, EV_STOPPED
    int32_t burst           # probes left of the current burst
    int32_t pause           # guesses to decline until the next one
    int32_t interval        # the pause after that

ctypedef struct fc_evidence:
    fc_predictor predictors[64]
    int32_t mode            # EV_AUTO, EV_ALWAYS, EV_OFF
    int32_t held_back       # 1: the device's scheduler keeps guesses behind demands
    double ns_per_byte      # of demand reads, measured
    int32_t measured
    # visits: contiguous runs of demands to one layer
    int32_t watched         # guesses that a visit of their layer may find out
    int32_t gone            # guesses that waited until their layer was visited without them: to be ended
    int32_t n_layers
    int32_t n_slots
    int32_t layer           # of the visit that is open, or -1
    uint32_t visit          # its number
    uint32_t *seen          # [n_keys] number of the visit that last asked for it
    # a guess goes by its slot, and by n_slots + i while it waits for one in place i: [2 * n_slots]
    int32_t *head           # [n_layers + 1] watched guesses of the layer, or -1; at the end, those gone
    int32_t *next
    int32_t *prev
    uint8_t *watch          # what is known of the guess
    uint8_t *by             # predictor of the load, where a prefetch or a pin issued it
    int64_t *nbytes         # payload of that load
    uint8_t *displaced      # [n_keys] predictor whose guess evicted it, plus 1; 0: none
    # waits: times in which at least one demand load is under way
    int32_t waiting         # demand loads under way
    int32_t guess_ops       # guess reads at the device
    int64_t at_ns           # until when the next two are counted
    int64_t overlap_ns      # time in which both were above 0
    int64_t share_ns        # the same, each moment divided by the guess reads that shared it
    int64_t since_ns        # when this wait began
    int64_t since_overlap   # overlap_ns then
    int64_t wait_bytes      # payload that landed in it

cdef int evidence_init(fc_evidence *e, int32_t n_layers, int32_t n_keys, int32_t n_slots) noexcept nogil     # 0 or -ENOMEM
cdef void evidence_free(fc_evidence *e) noexcept nogil

# Whether a guess of `predictor`, the nth of `total` in its call that need a read, may be read.
cdef bint evidence_admit(fc_evidence *e, int predictor, int32_t nth, int32_t total) noexcept nogil
# A guess (or a pin) took `slot`, or waits; `evicted` = the read expert that made room, or -1.
cdef void evidence_issued(fc_evidence *e, int predictor, int32_t slot, int32_t layer, int32_t key, int64_t payload,
                          int32_t evicted) noexcept nogil
# One that waited has got `slot`.
cdef void evidence_moved(fc_evidence *e, int32_t place, int32_t slot, int32_t evicted) noexcept nogil
# One of those gone, or -1. It stays among them until it is dropped.
cdef int32_t evidence_gone(const fc_evidence *e) noexcept nogil
cdef void evidence_joined(fc_evidence *e, int32_t slot) noexcept nogil          # by a demand, in flight
# It landed; `early` bytes of it had been read when the first demand joined, which together waited `wait_ns`.
cdef void evidence_landed(fc_evidence *e, int32_t slot, bint late, int64_t early, int64_t wait_ns) noexcept nogil
cdef void evidence_dropped(fc_evidence *e, int32_t slot, bint cancelled, int64_t wait_ns) noexcept nogil
cdef void evidence_used(fc_evidence *e, int32_t slot) noexcept nogil
cdef void evidence_wasted(fc_evidence *e, int32_t slot) noexcept nogil
# A demand has to read `key`: was it here before a guess took its place?
cdef void evidence_absent(fc_evidence *e, int32_t key, int64_t payload) noexcept nogil

cdef void evidence_wait_begins(fc_evidence *e, int64_t now_ns) noexcept nogil
cdef void evidence_wait_ends(fc_evidence *e, int64_t now_ns, int64_t nbytes) noexcept nogil
# A guess read of `nbytes` is given to the device, and comes back. The first returns what the second is to be given.
cdef int64_t evidence_read_begins(fc_evidence *e, int64_t now_ns) noexcept nogil
cdef void evidence_read_ends(fc_evidence *e, int32_t slot, bint promoted, int64_t begun, int64_t now_ns,
                             int64_t nbytes) noexcept nogil

cdef void visit(fc_evidence *e, int32_t key, int32_t layer) noexcept nogil

cdef inline void evidence_demand(fc_evidence *e, int32_t key, int32_t layer) noexcept nogil:
    """A demand for `key`, in request order. On the hit path."""
    if e.watched > 0:
        visit(e, key, layer)
    else:
        e.layer = layer
