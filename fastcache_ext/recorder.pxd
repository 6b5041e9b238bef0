# What happens under a store's mutex, in order, as records of 8 bytes (docs/traces.md): a bounded ring that a native thread of its
# own empties into a file. The same hooks, pointed at a replayer, compare instead of writing.
from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t

from fastcache_ext.counters cimport FC_PHASES, N_COUNTERS, fc_counters
from fastcache_ext.policy cimport fc_witness
from fastcache_ext.threads cimport pthread_cond_t, pthread_mutex_t, pthread_t

cdef extern from *:
    """
    #define fc_likely(yes) __builtin_expect(!!(yes), 1)
    """
    bint fc_likely(bint yes) noexcept nogil

cdef enum:                  # kinds; fastcache/traces/format.py has the first four too
    T_TOKEN = 1
    T_BATCH = 2
    T_REQUEST = 3
    T_SINGLE = 4            # key: a BATCH of one demand and its REQUEST, a hit, in one record; aux as for that
    T_LANDED = 16           # key; flags FC_LANDED_*; aux the error
    T_EVICTED = 17          # key; flags bit 0: unread, bit 1: a prefetch had brought it
    T_LEASED = 18           # slot that a search asked about; flags 1: it was leased
    T_RELEASED = 19         # parked slot whose last lease had ended when a search looked
    T_RETRY = 20            # key of a request that had found no room is tried again; aux 1: with a private buffer
    T_SERVED = 21           # key; flags FC_AS_*: how that ended; aux as for a REQUEST
    T_REFUSED = 22          # key of a request that got no private buffer either; aux the error
    T_LEFT = 23             # key of a read under way that one demand waits for no longer
    T_CANCEL = 24           # key of a guess under way that was cancelled
    T_PIN = 25              # key
    T_UNPIN = 26            # key
    T_GAP = 27              # value: records lost here
    T_COUNTER = 28          # aux: index into the header's run.counters; flags bit 0: the value's high half, above it the phase
    T_END = 29              # flags FC_ENDED_*; value: records lost in all
    T_PHASE = 30            # aux: the phase that follows
    T_TIMED_OUT = 31        # aux: phase of a call that gave up waiting
    T_SWITCH = 32           # the policy becomes number `aux`; value: residents that go over, one MOVED each, in order
    T_MOVED = 33            # slot
    T_TRADE = 34            # key for whose class a slab changes hands; aux: residents that go for it, one EVICTED each
    T_BEGUN = 35            # key of a guess whose turn it is to be read: it gets its slot, or it is over

cdef enum:                  # flags of REQUEST and SERVED
    FC_AS_HIT = 0
    FC_AS_JOIN = 1
    FC_AS_MISS = 2
    FC_AS_NO_ROOM = 3
    FC_AS_DECLINED = 4      # a guess that was not let in

cdef enum:                  # why a recording ended
    FC_ENDED_NOT = 0
    FC_ENDED_STOPPED = 1
    FC_ENDED_CLOSED = 2     # the store was
    FC_ENDED_FULL = 3       # the file
    FC_ENDED_ERROR = 4      # of writing it

cdef enum:
    TRAILER = 2 * FC_PHASES * N_COUNTERS + 2    # records at the end of the file: the counters, and why
    RECORDER_LEAST = TRAILER + 64       # records that a file must have room for

ctypedef struct fc_recorder:
    uint64_t *at            # where the next record goes
    const uint64_t *end     # records may go there, before slow() is asked
    int64_t owed            # requests of the open batch that are still to come: room is kept for them
    uint64_t (*slow)(fc_recorder *r, uint64_t record) noexcept nogil     # returns the record that stands there now
    bint (*admitted)(fc_recorder *r) noexcept nogil     # NULL, or in a replay: whether the next guess was let in
    fc_witness witness      # for the policy
    # below: slow()'s and the thread's, under the mutex but for `ring`
    pthread_mutex_t *mutex  # borrowed: the store's
    fc_recorder **place     # borrowed: where the store keeps this one; NULL there once it has ended
    fc_witness **witness_place
    fc_counters *counters   # borrowed
    uint64_t *ring          # [capacity]
    int64_t capacity
    int64_t granted         # records put so far, plus those up to `end`
    int64_t drained         # records that the thread has written: atomic
    int64_t limit           # records that fit into the file
    int64_t skip            # requests of a batch for which there was no room
    int64_t gap             # records lost since the last one that was put
    int64_t dropped         # records lost in all
    int64_t start           # bytes of the file's header
    int64_t exact_at        # bytes: where the header says true or false
    int32_t exact           # 0: the recording began after requests, or lost records
    int32_t ended           # FC_ENDED_*
    int32_t over            # the thread has nothing left to do
    int32_t error           # 0, or the positive errno that ended it
    int32_t fd
    int32_t joined
    int32_t bell            # a futex: 1 when the thread should look now
    pthread_cond_t done     # who waits for the thread waits here
    pthread_t thread
    int64_t final[FC_PHASES][N_COUNTERS]        # the counters when it ended

# NULL with *error. The file is open, and its header of `start` bytes written; the file will be `limit_bytes` at most.
cdef fc_recorder *recorder_new(int fd, int64_t start, int64_t exact_at, int64_t limit_bytes, int64_t ring_records,
                               int *error) noexcept nogil
# Begin: 0 or a positive errno, EBUSY where another one is running. Exact while `used` is 0: the store was asked for nothing yet.
# The mutex is taken and left.
cdef int recorder_start(fc_recorder *r, pthread_mutex_t *mutex, fc_recorder **place, fc_witness **witness_place,
                        fc_counters *counters, const int32_t *used) noexcept nogil
# End, once: nothing is recorded any more. The mutex is held.
cdef void recorder_end(fc_recorder *r, int why) noexcept nogil
# Wait for the thread to have written everything; < 0: no limit. 0 or ETIMEDOUT.
cdef int recorder_join(fc_recorder *r, int64_t timeout_ns) noexcept nogil
cdef void recorder_free(fc_recorder *r) noexcept nogil        # one that was never started, or that was joined

cdef inline uint64_t record(int kind, int flags, int aux, int32_t value) noexcept nogil:
    return <uint64_t>kind | <uint64_t>flags << 8 | <uint64_t><uint16_t>aux << 16 | <uint64_t>value << 32

cdef inline int64_t recorder_head(const fc_recorder *r) noexcept nogil:
    return r.granted - (r.end - r.at)

cdef inline int note(fc_recorder *r, int kind, int flags, int aux, int32_t value) noexcept nogil:
    """An event. NULL: nothing is recorded. Returns `aux`, or what a replay says instead. The mutex is held, here and below."""
    if r == NULL:
        return aux
    if r.end - r.at > r.owed:
        r.at[0] = record(kind, flags, aux, value)
        r.at += 1
        return aux
    return <uint16_t>(r.slow(r, record(kind, flags, aux, value)) >> 16)

cdef inline void note_batch(fc_recorder *r, int mode, int predictor, int n) noexcept nogil:
    """n note_request() follow, with events between them."""
    if r == NULL:
        return
    if r.end - r.at > n:
        r.owed = n
        r.at[0] = record(T_BATCH, mode, predictor, n)
        r.at += 1
    else:
        r.slow(r, record(T_BATCH, mode, predictor, n))

cdef inline int note_request(fc_recorder *r, int outcome, int32_t key, int held) noexcept nogil:
    """One of a batch; `held`: somebody else held the expert already. Returns that, or what a replay says instead."""
    if r == NULL:
        return held
    if r.at < r.end and r.skip == 0:
        r.owed -= 1
        r.at[0] = record(T_REQUEST, outcome, held, key)
        r.at += 1
        return held
    return <uint16_t>(r.slow(r, record(T_REQUEST, outcome, held, key)) >> 16)

cdef inline int note_single(fc_recorder *r, int32_t key, int held) noexcept nogil:
    """A demand for one expert, and a hit: note_batch() and note_request() in one; no batch is open, so no room is owed. `held` is
    branched on, not computed with: it is what an atomic step gave; the record would wait for that, and for the record the mutex."""
    cdef uint64_t *at
    if r == NULL:
        return held
    at = r.at
    if fc_likely(at < r.end):
        if fc_likely(not held):
            at[0] = record(T_SINGLE, 0, 0, key)
        else:
            at[0] = record(T_SINGLE, 0, held, key)
        r.at = at + 1
        return held
    return <uint16_t>(r.slow(r, record(T_SINGLE, 0, held, key)) >> 16)

cdef inline uint64_t *note_hits(fc_recorder *r, int n) noexcept nogil:
    """A demand for n experts that are all resident: where its n requests are to be written, before anything else is recorded.
    NULL: by note_request()."""
    cdef uint64_t *at
    if r == NULL:
        return NULL
    at = r.at
    if r.end - at <= n:
        note_batch(r, 0, 0, n)
        return NULL
    at[0] = record(T_BATCH, 0, 0, n)
    r.at = at + n + 1
    return at + 1
