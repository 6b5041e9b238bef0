"""The monitor: a store's one mutex and its life; waits, pins, cancel, close. Requests and landings have modules of their own.

Under the mutex: no Python object, no system call that can sleep (an eventfd write is the one there is), no loop over slots.
Owns fc_core and what an engine sees of it. Knows no Python, no tensor and no file format. May import the plain modules below it.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from fastcache_ext.arena cimport arena_ref, arena_unref, fork_generation, lease_drop, private_unref
from fastcache_ext.atomics cimport fc_load32, fc_store32
from fastcache_ext.counters cimport count_begin, count_end, count_wait, counters_destroy, counters_init
from fastcache_ext.evidence cimport EV_CALLER, EV_PIN, EV_WARM, evidence_free, evidence_init
from fastcache_ext.ghosts cimport ghosts_free, ghosts_new, ghosts_used
from fastcache_ext.landing cimport finish, guess_begin
from fastcache_ext.ioqueue cimport FC_CANCEL_WANTED, FC_ECANCELLED, FC_ECLOSED, FC_GUESS, queue_init, queue_unlink
from fastcache_ext.recorder cimport T_CANCEL, T_LEFT, T_PIN, T_TOKEN, T_UNPIN, note
from fastcache_ext.sums cimport sums_free
from fastcache_ext.table cimport FC_INFLIGHT, fc_slot, table_destroy, table_init
from fastcache_ext.threads cimport *

cdef void *copied(const void *source, int64_t nbytes) noexcept nogil:
    cdef void *p = malloc(<size_t>nbytes + 1)
    if p != NULL:
        memcpy(p, source, <size_t>nbytes)
    return p


cdef fc_core *core_new(fc_arena *arena, int32_t n_layers, const int32_t *layer_first, const uint8_t *cls_of, int policy,
                       const fc_extent *extents, int64_t n_extents, const int32_t *ext_first, const int64_t *span,
                       fc_file *files, int32_t n_files, int n_ops, int64_t chunk, int64_t guess_chunk) noexcept nogil:
    cdef fc_core *c = <fc_core *>calloc(1, sizeof(fc_core))
    cdef int32_t i, n_keys = layer_first[n_layers]
    if c == NULL:
        return NULL
    c.files = files
    c.n_files = n_files
    c.overflow_limit = -1
    c.fork_gen = fork_generation()
    c.moves_inline = 1
    pthread_mutex_init(&c.mutex, NULL)
    fc_cond_init(&c.work)
    fc_cond_init(&c.chores)
    c.arena = arena
    arena_ref(arena)
    queue_init(&c.queue, chunk, guess_chunk, guess_chunk)      # one guess read at the device, while demands may come
    c.extents = <fc_extent *>copied(extents, n_extents * <int64_t>sizeof(fc_extent))
    c.ext_first = <int32_t *>copied(ext_first, (n_keys + 1) * <int64_t>sizeof(int32_t))
    c.span = <int64_t *>copied(span, n_keys * <int64_t>sizeof(int64_t))
    c.loads = <fc_load *>calloc(2 * arena.n_slots + 1, sizeof(fc_load))
    c.place_of = <int32_t *>malloc(n_keys * sizeof(int32_t) + 1)
    c.ops = <fc_op *>calloc(n_ops, sizeof(fc_op))
    if (c.extents == NULL or c.ext_first == NULL or c.span == NULL or c.loads == NULL or c.ops == NULL
            or c.place_of == NULL
            or counters_init(&c.counters, n_layers) != 0
            or table_init(&c.table, arena, n_layers, layer_first, cls_of, policy) != 0
            or evidence_init(&c.evidence, n_layers, n_keys, arena.n_slots) != 0):
        core_free(c)
        return NULL
    c.n_ops = n_ops
    for i in range(n_keys):
        c.place_of[i] = -1
    for i in range(2 * arena.n_slots - 1, arena.n_slots - 1, -1):
        c.loads[i].place = i
        c.loads[i].next = c.places
        c.places = &c.loads[i]
    for i in range(n_ops):
        c.ops[i].next = c.free_ops
        c.free_ops = &c.ops[i]
    return c


cdef void core_free(fc_core *c) noexcept nogil:
    table_destroy(&c.table)
    evidence_free(&c.evidence)
    ghosts_free(c.ghosts)
    sums_free(c.sums)
    free(c.loads)
    free(c.place_of)
    free(c.ops)
    counters_destroy(&c.counters)
    free(c.extents)
    free(c.ext_first)
    free(c.span)
    pthread_cond_destroy(&c.work)
    pthread_cond_destroy(&c.chores)
    pthread_mutex_destroy(&c.mutex)
    arena_unref(c.arena)
    free(c)


cdef void core_haunt(fc_core *c, const int32_t *kinds, int32_t n_kinds, int choosing) noexcept nogil:
    cdef int32_t slots[16]
    cdef int32_t i
    for i in range(c.arena.n_classes):
        slots[i] = c.table.n_of[i]
    c.ghosts = ghosts_new(c.table.n_layers, c.table.layer_first, c.table.cls_of, c.span, c.arena.n_classes, slots,
                          kinds, n_kinds, 0)
    if c.ghosts != NULL:
        c.ghosts.wake = &c.chores
        c.ghosts.choosing = choosing
        ghosts_used(c.ghosts, c.table.policy.kind)


cdef bint core_pin(fc_core *c, fc_wait *w, fc_node *node) noexcept nogil:
    cdef fc_slot *slot = &c.table.slots[node.slot]
    cdef int cls = c.table.cls_of[node.key]
    cdef bint room = True
    pthread_mutex_lock(&c.mutex)
    if slot.pinned:
        lease_drop(w.arena, node.slot)
    elif c.table.n_pinned[cls] + 1 < c.table.n_of[cls]:
        slot.pinned = 1
        c.table.n_pinned[cls] += 1
        note(c.recorder, T_PIN, 0, 0, node.key)
    else:
        room = False                        # another call has pinned meanwhile
    if room:
        node_set(node, FC_NODE_TAKEN)
    pthread_mutex_unlock(&c.mutex)
    return room


cdef bint core_unpin(fc_core *c, int32_t key) noexcept nogil:
    cdef int32_t slot
    cdef bint was = False
    pthread_mutex_lock(&c.mutex)
    slot = c.table.slot_of[key]
    if not c.closing and slot >= 0 and c.table.slots[slot].pinned:
        c.table.slots[slot].pinned = 0
        c.table.n_pinned[c.table.cls_of[key]] -= 1
        lease_drop(c.arena, slot)
        note(c.recorder, T_UNPIN, 0, 0, key)
        was = True
    pthread_mutex_unlock(&c.mutex)
    return was


cdef void wait_init(fc_wait *w, fc_core *c, int mode, int each, fc_node *nodes, int n) noexcept nogil:
    cdef int i
    w.mode = mode
    w.predictor = EV_PIN if mode == FC_MODE_PIN else EV_WARM if mode == FC_MODE_WARM else EV_CALLER
    w.each = each
    w.pending = 0
    w.n = n
    w.nodes = nodes
    w.landed_first = w.landed_last = NULL
    w.arena = c.arena
    arena_ref(c.arena)
    for i in range(n):
        node_set(&nodes[i], FC_NODE_NEW)
        nodes[i].slot = -1
        nodes[i].wait = w


cdef void detach(fc_core *c, fc_node *node) noexcept nogil:
    cdef fc_load *load = node.load
    if node.wait.mode == FC_MODE_DEMAND:    # it waits no longer, and has waited until now
        count_begin(&c.counters)
        count_wait(&c.counters, node.phase, c.table.layer_of[node.key], fc_now_ns() - node.since_ns)
        count_end(&c.counters)
        note(c.recorder, T_LEFT, 0, node.phase, node.key)
    if node.prev != NULL:
        node.prev.next = node.next
    else:
        load.waiters = node.next
    if node.next != NULL:
        node.next.prev = node.prev
    load.waits -= 1
    node.load = NULL


cdef void node_give_up(fc_core *c, fc_node *node) noexcept nogil:
    if node_is(node, FC_NODE_FLYING):
        detach(c, node)
    elif not node_is(node, FC_NODE_HELD):
        return
    if node.priv != NULL:
        private_unref(node.priv)
        node.priv = NULL
    elif node.slot >= 0 and node.wait.mode != FC_MODE_GUESS:
        lease_drop(node.wait.arena, node.slot)
    node_set(node, FC_NODE_TAKEN)


cdef void wait_done(fc_wait *w, fc_core *c) noexcept nogil:
    cdef int i
    pthread_mutex_lock(&c.mutex)
    for i in range(w.n):
        node_give_up(c, &w.nodes[i])
    pthread_mutex_unlock(&c.mutex)
    arena_unref(w.arena)


cdef int core_sleep(fc_core *c, fc_wait *w, int64_t until_ns) noexcept nogil:
    cdef int32_t pending
    cdef int64_t left
    cdef bint landed = False
    while True:
        pending = fc_load32(&w.pending)     # before the list: a landing from here on changes the word
        if pending == 0:
            return 1
        if w.each:
            pthread_mutex_lock(&c.mutex)
            landed = w.landed_first != NULL
            pthread_mutex_unlock(&c.mutex)
        if landed:
            return 1
        left = until_ns - fc_now_ns()
        if left <= 0:
            return 0
        fc_futex_wait(&w.pending, pending, left)


cdef fc_node *core_next_landed(fc_core *c, fc_wait *w) noexcept nogil:
    cdef fc_node *node
    pthread_mutex_lock(&c.mutex)
    node = w.landed_first
    if node != NULL:
        w.landed_first = node.landed
        if w.landed_first == NULL:
            w.landed_last = NULL
    pthread_mutex_unlock(&c.mutex)
    return node


# ---- ends

cdef bint drop_reads(fc_core *c, fc_load *load) noexcept nogil:
    """Have the engine stop the reads of a load that nobody wants, if it can. Looks at each op of the pool."""
    cdef int32_t i
    cdef bint some = False
    for i in range(c.n_ops if c.stop_reads != NULL else 0):
        if c.ops[i].load == load:
            fc_store32(&c.ops[i].cancel, FC_CANCEL_WANTED)
            some = True
    return some


cdef int core_cancel(fc_core *c, fc_wait *w) noexcept nogil:
    cdef fc_node *node
    cdef fc_load *load
    cdef int i, n = 0
    cdef bint stop = False
    pthread_mutex_lock(&c.mutex)
    for i in range(w.n):
        node = &w.nodes[i]
        load = node.load
        # A guess that this call issued, that nobody else waits for, and that has not begun to land.
        if (not node_is(node, FC_NODE_FLYING) or not node.issued or load.klass != FC_GUESS or load.waits > 1
                or load.landing or load.error != 0):
            continue
        n += 1
        note(c.recorder, T_CANCEL, 0, 0, load.key)
        queue_unlink(&c.queue, load)
        load.error = FC_ECANCELLED
        if load.ops == 0:
            finish(c, load, FC_ECANCELLED)      # else: EMPTY once the reads at the device are over
        else:
            stop |= drop_reads(c, load)
    if stop:
        c.stop_reads(c.engine)
    pthread_mutex_unlock(&c.mutex)
    return n


cdef void core_mark_token(fc_core *c, int64_t n) noexcept nogil:
    pthread_mutex_lock(&c.mutex)
    # Beyond what a record holds, the index is not known: a server that runs for weeks goes on.
    note(c.recorder, T_TOKEN, 0, c.counters.phase, <int32_t>(c.tokens if c.tokens <= 0x7FFFFFFF else -1))
    c.tokens += n
    pthread_mutex_unlock(&c.mutex)


cdef void core_finish_by_hand(fc_core *c, fc_load *load, int error) noexcept nogil:
    pthread_mutex_lock(&c.mutex)
    finish(c, load, error)
    pthread_mutex_unlock(&c.mutex)


cdef bint core_claim(fc_core *c, fc_node *node) noexcept nogil:
    cdef bint mine
    pthread_mutex_lock(&c.mutex)
    mine = node_is(node, FC_NODE_FLYING) and not node.load.landing
    if mine and node.load.waiting:
        mine = guess_begin(c, node.load)
    if mine:
        node.load.landing = 1               # nobody cancels it now, and nobody else fills it
    pthread_mutex_unlock(&c.mutex)
    return mine


cdef void core_abandon(fc_core *c, fc_node *node) noexcept nogil:
    pthread_mutex_lock(&c.mutex)
    if node_is(node, FC_NODE_FLYING) and node.load.waits == 1 and not node.load.landing:
        finish(c, node.load, FC_ECANCELLED)
    pthread_mutex_unlock(&c.mutex)


cdef void core_close(fc_core *c) noexcept nogil:
    cdef fc_load *load
    cdef fc_load *after
    cdef int32_t i
    cdef int k
    cdef bint stop = False
    pthread_mutex_lock(&c.mutex)
    fc_store32(&c.closing, 1)              # read without the mutex too
    for k in range(2):
        while c.queue.head[k] != NULL:
            load = c.queue.head[k]
            queue_unlink(&c.queue, load)
            if load.error == 0:
                load.error = FC_ECLOSED
            if load.ops == 0:
                finish(c, load, load.error)
    for i in range(c.n_ops):                # guesses that are being read
        load = c.ops[i].load
        if load != NULL and load.klass == FC_GUESS and not load.landing:
            if load.error == 0:
                load.error = FC_ECLOSED
            stop |= drop_reads(c, load)
    if stop:
        c.stop_reads(c.engine)
    if c.by_hand:                           # what a Python source has not begun to fill
        for i in range(c.table.n_slots):
            if c.table.slots[i].state == FC_INFLIGHT and not c.loads[i].landing:
                finish(c, &c.loads[i], FC_ECLOSED)
        load = c.privates
        while load != NULL:
            after = load.newer
            if not load.landing:
                finish(c, load, FC_ECLOSED)
            load = after
    pthread_cond_broadcast(&c.work)
    pthread_cond_broadcast(&c.chores)
    if c.kick != NULL:
        c.kick(c.engine)
    pthread_mutex_unlock(&c.mutex)


cdef void core_lock(fc_core *c) noexcept nogil:
    pthread_mutex_lock(&c.mutex)


cdef void core_unlock(fc_core *c) noexcept nogil:
    pthread_mutex_unlock(&c.mutex)
