# The monitor: the one mutex, and everything that happens under it. Plain C; no Python object, no call that can sleep while locked.
from libc.stdint cimport int32_t, int64_t, uint8_t

from fastcache_ext.arena cimport fc_arena, fc_private
from fastcache_ext.atomics cimport fc_load32, fc_store32
from fastcache_ext.counters cimport fc_counters
from fastcache_ext.evidence cimport fc_evidence
from fastcache_ext.ghosts cimport fc_ghosts
from fastcache_ext.ioqueue cimport fc_extent, fc_file, fc_load, fc_op, fc_queue
from fastcache_ext.recorder cimport fc_recorder
from fastcache_ext.sums cimport fc_sums
from fastcache_ext.table cimport fc_table
from fastcache_ext.threads cimport pthread_cond_t, pthread_mutex_t, pthread_t

cdef enum:                  # what a wait is for
    FC_MODE_DEMAND = 0      # somebody wants the experts now: leases, counted as requests
    FC_MODE_GUESS = 1       # a prefetch: no leases
    FC_MODE_PIN = 2         # counted like a prefetch, read and leased like a demand
    FC_MODE_WARM = 3        # the same, but evicts as little as a guess

cdef enum:                  # what became of a node
    FC_NODE_NEW = 0
    FC_NODE_HELD = 1        # resident (or in a private buffer); one lease is counted for it, except in FC_MODE_GUESS
    FC_NODE_FLYING = 2
    FC_NODE_FAILED = 3
    FC_NODE_NO_ROOM = 4     # nothing could be evicted for it
    FC_NODE_TAKEN = 5       # its lease went over to a Hold
    FC_NODE_DECLINED = 6    # a guess that was not let in

ctypedef struct fc_node:        # one distinct expert of one call
    int32_t key
    int32_t status          # FC_NODE_*; atomic: written under the mutex, read anywhere, through node_is and node_set
    int32_t slot            # or -1
    fc_private *priv        # owned reference, or NULL
    uint8_t *data           # first byte, once HELD
    int64_t generation
    int32_t asked           # the policy has heard of the request
    int32_t issued          # this call issued the load
    int32_t late            # (guess) a demand joined before it landed
    int32_t was_resident    # a hit, for a demand
    int32_t error           # 0, a positive errno or FC_E*
    int32_t error_file
    int64_t error_offset
    int64_t error_wanted
    int64_t error_got
    int64_t since_ns        # of its request
    int32_t phase           # that the store was in at its request
    fc_load *load           # while FLYING
    fc_wait *wait
    fc_node *prev           # neighbours in the load's waiters
    fc_node *next
    fc_node *landed         # next in the wait's list of landed nodes

ctypedef struct fc_wait:        # one call's wait
    int32_t mode
    int32_t predictor       # of a guess or a pin: whose it is (evidence.pxd)
    int32_t each            # 1: wake at every landing (as_ready); 0: when the last one landed
    int32_t pending         # nodes FLYING; atomic, and the word that its caller sleeps on
    int32_t n
    fc_node *nodes
    fc_node *landed_first   # landed, not yet picked up; oldest first
    fc_node *landed_last
    fc_arena *arena         # owned reference

ctypedef struct fc_core:
    pthread_mutex_t mutex
    pthread_cond_t work     # an engine with nothing to do waits here
    pthread_cond_t chores   # the worker waits here
    fc_table table
    fc_queue queue
    fc_counters counters
    fc_evidence evidence
    fc_ghosts *ghosts       # owned, or NULL: not asked for
    fc_arena *arena         # owned reference
    fc_file *files          # borrowed from the FileSet
    int32_t n_files
    fc_extent *extents
    int32_t *ext_first      # [n_keys + 1]
    int64_t *span           # [n_keys] bytes of a slot that the key uses, padding included
    fc_load *loads          # [2 * n_slots] by slot; then those of guesses that wait (waiting.pxd)
    fc_load *places         # of these, the free ones, by `next`
    int32_t *place_of       # [n_keys] which of them the key has, or -1
    fc_load *privates       # private loads in flight
    fc_load *to_move        # landed loads that the worker is to put right: extents moved, bytes checked
    fc_sums *sums           # owned, or NULL: nothing is checked
    fc_op *ops              # [n_ops] the pool
    int32_t n_ops
    fc_op *free_ops
    fc_recorder *recorder   # NULL, or borrowed: hears of everything that happens here
    int64_t tokens          # tokens marked so far
    int32_t used            # 1 once anything was asked of it
    int64_t generation
    int64_t overflow_limit  # bytes, or -1
    int32_t idle            # engine threads waiting for work
    int32_t sleeping        # the ring sleeps in the kernel and wants a kick
    int32_t poke            # 1: the idle engine has a chore of its own (registration)
    int32_t guesses[16]     # per class: loads of prefetches under way
    int32_t guessed[16]     # of these, those that hold a slot
    int32_t closing
    int32_t direct_required
    int32_t fork_gen
    int32_t by_hand         # loads are filled by the caller (a Python source)
    int32_t moves_inline    # 1: engine threads move and check; 0: the worker does
    void (*kick)(void *engine) noexcept nogil
    void (*stop_reads)(void *engine) noexcept nogil     # of ops whose `cancel` says so; NULL: this engine cannot
    int64_t reads_stopped   # reads that the engine has stopped
    void *engine

cdef inline bint node_is(const fc_node *node, int status) noexcept nogil:
    return fc_load32(&node.status) == status

cdef inline void node_set(fc_node *node, int status) noexcept nogil:
    fc_store32(&node.status, status)        # after what it vouches for

# Copies the columns: keys of layer l are [layer_first[l], layer_first[l + 1]); NULL without memory.
cdef fc_core *core_new(fc_arena *arena, int32_t n_layers, const int32_t *layer_first, const uint8_t *cls_of, int policy,
                       const fc_extent *extents, int64_t n_extents, const int32_t *ext_first, const int64_t *span,
                       fc_file *files, int32_t n_files, int n_ops, int64_t chunk, int64_t guess_chunk) noexcept nogil
cdef void core_free(fc_core *c) noexcept nogil
# Set ghosts of the policies `kinds` to watch the traffic, and to choose (policy="auto") from the one in use on. Before the first
# request. None are set where no slot could hold anything, or without memory: c.ghosts stays NULL.
cdef void core_haunt(fc_core *c, const int32_t *kinds, int32_t n_kinds, int choosing) noexcept nogil

# Turn the lease of a HELD node into the pin of its slot (idempotent). False: that would leave no slot unpinned.
cdef bint core_pin(fc_core *c, fc_wait *w, fc_node *node) noexcept nogil
cdef bint core_unpin(fc_core *c, int32_t key) noexcept nogil

cdef void wait_init(fc_wait *w, fc_core *c, int mode, int each, fc_node *nodes, int n) noexcept nogil
cdef void node_give_up(fc_core *c, fc_node *node) noexcept nogil      # wait for it no longer, or hold it no longer; mutex held
cdef void wait_done(fc_wait *w, fc_core *c) noexcept nogil             # drops what was not taken
# Sleep until the wait is over (all landed; or, with `each`, one landed), or until the monotonic time. 1: over. 0: time.
cdef int core_sleep(fc_core *c, fc_wait *w, int64_t until_ns) noexcept nogil
cdef fc_node *core_next_landed(fc_core *c, fc_wait *w) noexcept nogil
cdef int core_cancel(fc_core *c, fc_wait *w) noexcept nogil            # guesses stopped
cdef void core_mark_token(fc_core *c, int64_t n) noexcept nogil        # what is requested from here on is for the next n tokens
# Loads that the caller fills. Claim: True when this caller is to fill the node's load. Abandon: it will be filled by nobody, and
# nobody else waits for it.
cdef bint core_claim(fc_core *c, fc_node *node) noexcept nogil
cdef void core_abandon(fc_core *c, fc_node *node) noexcept nogil
cdef void core_finish_by_hand(fc_core *c, fc_load *load, int error) noexcept nogil
cdef void core_close(fc_core *c) noexcept nogil                        # no new work; queued reads fail; engines told to stop
cdef void core_lock(fc_core *c) noexcept nogil                         # for looks that take but a moment
cdef void core_unlock(fc_core *c) noexcept nogil
