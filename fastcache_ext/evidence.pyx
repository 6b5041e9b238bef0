"""Evidence: whether guesses pay, per predictor, and how many of the next ones are therefore let in.

A guess is resolved when a demand uses or joins it, when it is evicted unread, or when its layer has been visited without it; the
last is taken back if it is used later, and ends a guess that still waits for a slot. Each resolution weighs

    gain   the wait that it saved: its bytes, as far as they were read ahead, at the measured rate of demand reads
    waste  a quarter of the device time that a wrong one took: the device may have had nothing else to do
    loss   waits of demands while a guess kept the device busy, and demand reads of experts that a guess evicted

and a predictor's cost is its waste plus (1 - share of guesses used) of its loss: a read that is used later was only moved.
Both sides fade over 64 resolutions. Below 32 nothing is decided, but that eight wrong ones and none right stop it: of a predictor
that is right half the time one in 256 begins so. Cost above gain stops the predictor, above half of it halves its calls. A stopped
one may send four single guesses after 64 declined ones, then after 128, and so on up to 4,096; three of them decide whether it may
start again.

Every function is O(1), but for a visit's end, which looks at a guess of its layer twice at most. No lock or clock. Imports libc.
"""
from libc.errno cimport ENOMEM
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free

NAMES = (
    "issued", "used", "late", "wasted", "cancelled", "failed", "unread", "in_flight", "missed", "displaced", "declined",
    "bytes", "late_wait_ns", "charged_wait_ns",
)
STATES = ("full", "narrowed", "stopped")
MODES = {"auto": EV_AUTO, "always": EV_ALWAYS, "off": EV_OFF}
RESERVED = {"caller": EV_CALLER, "pin": EV_PIN, "warm": EV_WARM}
MOST = EV_PREDICTORS

if len(NAMES) != N_EVIDENCE:
    raise ImportError("evidence.pxd and evidence.pyx disagree")

cdef enum:                  # watch[slot]
    NOTHING = 0             # no guess, or one that is not judged, or resolved
    OPEN = 1                # the end of its layer's visit resolves it
    LATER = 2               # issued while its layer was being visited: the end of the next one does
    ASKED = 3               # a demand waits for it
    MISSED = 4              # its layer was visited without it
    ASKED_AFTER_ALL = 5     # and then a demand came
    GONE = 6                # its layer was visited without it while it had no slot: it is not worth reading any more

cdef enum:
    FEW = 32                # resolutions that decide nothing ...
    SURE = 8                # ... but if all of the first so many were wrong
    PROBES = 4              # of one burst
    ENOUGH_PROBES = 3       # resolved ones that decide
    FIRST_PAUSE = 64        # guesses declined before a burst
    LONGEST_PAUSE = 4096

cdef double FADE = 1.0 - 1.0 / 64
cdef double WASTE = 0.25            # of a wrong guess's device time
cdef double NARROW_AT = 2.0         # gain / cost below which a predictor is narrowed
cdef double WIDEN_AT = 3.0          # and above which it is not any more
cdef double RESTART_AT = 1.5        # of probes
cdef double GUESSED_RATE = 0.5      # ns per byte, until a demand read was measured
cdef int64_t LONG_WAIT_NS = 100000000   # demands that never stop are measured in pieces of this


cdef int evidence_init(fc_evidence *e, int32_t n_layers, int32_t n_keys, int32_t n_slots) noexcept nogil:
    cdef int32_t i
    e.layer = -1
    e.n_layers = n_layers
    e.n_slots = n_slots
    e.ns_per_byte = GUESSED_RATE
    e.seen = <uint32_t *>calloc(n_keys + 1, sizeof(uint32_t))
    e.head = <int32_t *>calloc(n_layers + 1, sizeof(int32_t))
    e.next = <int32_t *>calloc(2 * n_slots + 1, sizeof(int32_t))
    e.prev = <int32_t *>calloc(2 * n_slots + 1, sizeof(int32_t))
    e.nbytes = <int64_t *>calloc(2 * n_slots + 1, sizeof(int64_t))
    e.watch = <uint8_t *>calloc(2 * n_slots + 1, 1)
    e.by = <uint8_t *>calloc(2 * n_slots + 1, 1)
    e.displaced = <uint8_t *>calloc(n_keys + 1, 1)
    if (e.seen == NULL or e.head == NULL or e.next == NULL or e.prev == NULL or e.nbytes == NULL or e.watch == NULL
            or e.by == NULL or e.displaced == NULL):
        return -ENOMEM
    for i in range(n_layers + 1):
        e.head[i] = -1
    for i in range(EV_PREDICTORS):
        e.predictors[i].pause = e.predictors[i].interval = FIRST_PAUSE
    return 0


cdef void evidence_free(fc_evidence *e) noexcept nogil:
    free(e.seen)
    free(e.head)
    free(e.next)
    free(e.prev)
    free(e.nbytes)
    free(e.watch)
    free(e.by)
    free(e.displaced)


# ---- the verdict

cdef void decide(fc_predictor *p) noexcept nogil:
    cdef double gain = p.gain_ns
    cdef double cost = p.waste_ns + (1.0 - min(p.hits / p.n, 1.0)) * p.loss_ns
    if p.state == EV_STOPPED:
        if p.resolved >= ENOUGH_PROBES and gain > RESTART_AT * cost:
            p.state = EV_NARROWED
            p.resolved = FEW // 2
            p.burst = 0
            p.pause = p.interval
    elif p.resolved < FEW and (p.hits > 0 or p.resolved < SURE):
        return
    elif gain < cost:
        p.state = EV_STOPPED
        p.burst = 0
        p.pause = p.interval
    elif gain < NARROW_AT * cost:
        p.state = EV_NARROWED
    elif gain >= WIDEN_AT * cost:
        p.state = EV_FULL
        p.interval = FIRST_PAUSE


cdef void fade(fc_predictor *p, double by) noexcept nogil:
    p.n *= by
    p.hits *= by
    p.gain_ns *= by
    p.waste_ns *= by
    p.loss_ns *= by


cdef bint probe(fc_predictor *p, int32_t nth) noexcept nogil:
    """Whether a stopped predictor may send this one."""
    if p.burst == 0:
        if p.pause > 0:
            p.pause -= 1
        if p.pause > 0 or nth > 0:
            return False
        p.burst = PROBES
        p.resolved = 0
        if p.n > PROBES:
            fade(p, PROBES / p.n)               # what was known counts as much as what comes
    if nth > 0:
        return False
    p.burst -= 1
    if p.burst == 0:
        p.interval = min(2 * p.interval, <int32_t>LONGEST_PAUSE)
        p.pause = p.interval
    return True


cdef bint evidence_admit(fc_evidence *e, int predictor, int32_t nth, int32_t total) noexcept nogil:
    cdef fc_predictor *p = &e.predictors[predictor]
    cdef bint may = True
    if predictor == EV_PIN or predictor == EV_WARM or e.mode == EV_ALWAYS:
        return True
    if e.mode == EV_OFF:
        may = False
    elif p.state == EV_NARROWED:
        may = nth < (total + 1) // 2
    elif p.state == EV_STOPPED:
        may = probe(p, nth)
    if not may:
        p.count[E_DECLINED] += 1
    return may


cdef void resolve(fc_evidence *e, int32_t slot, bint hit, double gain_ns, double waste_ns) noexcept nogil:
    cdef fc_predictor *p = &e.predictors[e.by[slot]]
    fade(p, FADE)
    p.n += 1
    p.hits += hit
    p.gain_ns += gain_ns
    p.waste_ns += waste_ns
    p.resolved += 1
    decide(p)


cdef void good(fc_evidence *e, int32_t slot, int64_t early) noexcept nogil:
    cdef fc_predictor *p = &e.predictors[e.by[slot]]
    cdef uint8_t was = e.watch[slot]
    leave(e, slot)
    if was == MISSED or was == ASKED_AFTER_ALL:         # take it back
        p.hits = min(p.hits + 1, p.n)
        p.gain_ns += early * e.ns_per_byte
        p.waste_ns = max(p.waste_ns - WASTE * e.nbytes[slot] * e.ns_per_byte, 0.0)
        decide(p)
    elif was != NOTHING:
        resolve(e, slot, True, early * e.ns_per_byte, 0)


# ---- a guess's life

cdef void leave(fc_evidence *e, int32_t slot) noexcept nogil:
    """No visit resolves the guess in `slot` any more."""
    cdef uint8_t was = e.watch[slot]
    if was == OPEN or was == LATER or was == GONE:
        e.gone -= was == GONE
        e.watched -= was != GONE
        if e.next[slot] >= 0:
            e.prev[e.next[slot]] = e.prev[slot]
        if e.prev[slot] >= 0:
            e.next[e.prev[slot]] = e.next[slot]
        else:
            e.head[-1 - e.prev[slot]] = e.next[slot]
    e.watch[slot] = NOTHING


cdef inline void enter(fc_evidence *e, int32_t slot, int32_t layer) noexcept nogil:
    e.prev[slot] = -1 - layer                   # the head of that layer's list points here
    e.next[slot] = e.head[layer]
    if e.head[layer] >= 0:
        e.prev[e.head[layer]] = slot
    e.head[layer] = slot


cdef void evidence_issued(fc_evidence *e, int predictor, int32_t slot, int32_t layer, int32_t key, int64_t payload,
                          int32_t evicted) noexcept nogil:
    cdef fc_predictor *p = &e.predictors[predictor]
    leave(e, slot)
    p.count[E_ISSUED] += 1
    p.count[E_IN_FLIGHT] += 1
    e.by[slot] = <uint8_t>predictor
    e.nbytes[slot] = payload
    e.displaced[key] = 0
    if predictor == EV_PIN or predictor == EV_WARM:
        return
    if evicted >= 0:
        e.displaced[evicted] = <uint8_t>(predictor + 1)
    if e.watched == 0:
        e.visit += 1                            # what was seen before nobody watched is stale
    e.watched += 1
    e.watch[slot] = LATER if layer == e.layer else OPEN
    enter(e, slot, layer)


cdef void evidence_moved(fc_evidence *e, int32_t place, int32_t slot, int32_t evicted) noexcept nogil:
    cdef uint8_t was = e.watch[place]
    leave(e, slot)
    e.by[slot] = e.by[place]
    e.nbytes[slot] = e.nbytes[place]
    if was == OPEN or was == LATER:
        e.next[slot] = e.next[place]
        e.prev[slot] = e.prev[place]
        if e.next[slot] >= 0:
            e.prev[e.next[slot]] = slot
        if e.prev[slot] >= 0:
            e.next[e.prev[slot]] = slot
        else:
            e.head[-1 - e.prev[slot]] = slot
        e.watch[slot] = was
        e.watch[place] = NOTHING
    leave(e, place)                             # one that was gone is resolved: its use changes nothing
    if evicted >= 0:
        e.displaced[evicted] = <uint8_t>(e.by[slot] + 1)


cdef int32_t evidence_gone(const fc_evidence *e) noexcept nogil:
    return e.head[e.n_layers]


cdef void evidence_joined(fc_evidence *e, int32_t slot) noexcept nogil:
    cdef uint8_t was = e.watch[slot]
    if was == NOTHING or was == ASKED or was == ASKED_AFTER_ALL:
        return
    leave(e, slot)
    e.watch[slot] = ASKED_AFTER_ALL if was == MISSED else ASKED


cdef void evidence_landed(fc_evidence *e, int32_t slot, bint late, int64_t early, int64_t wait_ns) noexcept nogil:
    cdef fc_predictor *p = &e.predictors[e.by[slot]]
    p.count[E_IN_FLIGHT] -= 1
    p.count[E_BYTES] += e.nbytes[slot]
    p.count[E_LATE_WAIT_NS] += wait_ns
    if late:
        p.count[E_LATE] += 1
        good(e, slot, early)
    else:
        p.count[E_UNREAD] += 1


cdef void evidence_dropped(fc_evidence *e, int32_t slot, bint cancelled, int64_t wait_ns) noexcept nogil:
    cdef fc_predictor *p = &e.predictors[e.by[slot]]
    p.count[E_IN_FLIGHT] -= 1
    p.count[E_CANCELLED if cancelled else E_FAILED] += 1
    p.count[E_LATE_WAIT_NS] += wait_ns
    leave(e, slot)


cdef void evidence_used(fc_evidence *e, int32_t slot) noexcept nogil:
    cdef fc_predictor *p = &e.predictors[e.by[slot]]
    p.count[E_USED] += 1
    p.count[E_UNREAD] -= 1
    good(e, slot, e.nbytes[slot])


cdef void evidence_wasted(fc_evidence *e, int32_t slot) noexcept nogil:
    cdef fc_predictor *p = &e.predictors[e.by[slot]]
    cdef uint8_t was = e.watch[slot]
    p.count[E_WASTED] += 1
    p.count[E_UNREAD] -= 1
    leave(e, slot)
    if was == OPEN or was == LATER:
        resolve(e, slot, False, 0, WASTE * e.nbytes[slot] * e.ns_per_byte)


cdef void evidence_absent(fc_evidence *e, int32_t key, int64_t payload) noexcept nogil:
    cdef fc_predictor *p
    if e.displaced[key] == 0:
        return
    p = &e.predictors[e.displaced[key] - 1]
    e.displaced[key] = 0
    p.count[E_DISPLACED] += 1
    if p.state != EV_STOPPED:           # or what it did before it was stopped would outweigh its probes for long
        p.loss_ns += payload * e.ns_per_byte


# ---- visits

cdef void close_visit(fc_evidence *e, int32_t layer) noexcept nogil:
    cdef int32_t slot = e.head[layer]
    cdef int32_t after
    while slot >= 0:
        after = e.next[slot]
        if e.watch[slot] == LATER:
            e.watch[slot] = OPEN
        else:
            leave(e, slot)
            e.predictors[e.by[slot]].count[E_MISSED] += 1
            if slot < e.n_slots:
                e.watch[slot] = MISSED
                resolve(e, slot, False, 0, WASTE * e.nbytes[slot] * e.ns_per_byte)
            else:
                e.watch[slot] = GONE
                e.gone += 1
                enter(e, slot, e.n_layers)
                resolve(e, slot, False, 0, 0)   # wrong, but nothing was read for it
        slot = after


cdef void visit(fc_evidence *e, int32_t key, int32_t layer) noexcept nogil:
    if layer != e.layer or e.seen[key] == e.visit:
        if e.layer >= 0:
            close_visit(e, e.layer)
        e.layer = layer
        e.visit += 1
    e.seen[key] = e.visit


# ---- waits

cdef void tick(fc_evidence *e, int64_t now_ns) noexcept nogil:
    if e.waiting > 0 and e.guess_ops > 0:
        e.overlap_ns += now_ns - e.at_ns
        e.share_ns += (now_ns - e.at_ns) // e.guess_ops
    e.at_ns = now_ns


cdef void wait_anew(fc_evidence *e, int64_t now_ns) noexcept nogil:
    e.since_ns = now_ns
    e.since_overlap = e.overlap_ns
    e.wait_bytes = 0


cdef void evidence_wait_begins(fc_evidence *e, int64_t now_ns) noexcept nogil:
    tick(e, now_ns)
    if e.waiting == 0:
        wait_anew(e, now_ns)
    e.waiting += 1


cdef void evidence_wait_ends(fc_evidence *e, int64_t now_ns, int64_t nbytes) noexcept nogil:
    cdef double rate
    cdef int64_t alone
    tick(e, now_ns)
    e.waiting -= 1
    e.wait_bytes += nbytes
    if e.waiting > 0 and now_ns - e.since_ns < LONG_WAIT_NS:
        return
    alone = now_ns - e.since_ns - (e.overlap_ns - e.since_overlap)
    if e.wait_bytes > 0 and alone > 0:
        rate = <double>alone / e.wait_bytes
        e.ns_per_byte += (rate - e.ns_per_byte) / (8 if e.measured else 1)
        e.measured = 1
    wait_anew(e, now_ns)


cdef int64_t evidence_read_begins(fc_evidence *e, int64_t now_ns) noexcept nogil:
    tick(e, now_ns)
    e.guess_ops += 1
    return e.share_ns


cdef void evidence_read_ends(fc_evidence *e, int32_t slot, bint promoted, int64_t begun, int64_t now_ns,
                             int64_t nbytes) noexcept nogil:
    cdef fc_predictor *p = &e.predictors[e.by[slot]]
    cdef int64_t charge
    tick(e, now_ns)
    e.guess_ops -= 1
    charge = e.share_ns - begun
    if e.held_back:         # it may have waited for the demand, rather than the demand for it: no more than its own device time
        charge = min(charge, <int64_t>(nbytes * e.ns_per_byte))
    if not promoted and charge > 0:             # a promoted one was waited for, and that is counted as late
        p.count[E_CHARGED_WAIT_NS] += charge
        p.loss_ns += charge
