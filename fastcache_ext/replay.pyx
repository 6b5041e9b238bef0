"""Exact replay: a recorded run through the store's own code again, without files, threads or memory for experts.

What a store cannot know beforehand comes from the records: who asked for what, when reads landed and how, which slots a search
found leased, which guesses were let in. What the store decided is decided again, by the same requests, landing, table and policy.
Their hooks, which wrote the records, compare them now (checker.pyx); the first difference ends the replay. May import everything
below report.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

from fastcache_ext.counters import LAYER_NAMES
from fastcache_ext.policy import NAMES as POLICIES

from fastcache_ext.arena cimport (
    FC_HUGE_OFF, FC_MAX_PER_SLAB, arena_new, arena_unref, fc_arena, fc_private, fc_slabs, lease_drop, private_new, private_unref,
    slabs_read,
)
from fastcache_ext.atomics cimport fc_add32
from fastcache_ext.checker cimport *
from fastcache_ext.counters cimport (
    FC_ERROR_TIMEOUT, FC_FIRST_ERROR, FC_PHASES, N_COUNTERS, N_LAYER_COUNTERS, count_in, counters_phase,
)
from fastcache_ext.evidence cimport EV_PREDICTORS
from fastcache_ext.ioqueue cimport FC_ECANCELLED, fc_extent, fc_load, queue_unlink
from fastcache_ext.landing cimport finish, guess_begin
from fastcache_ext.monitor cimport (
    FC_MODE_DEMAND, FC_MODE_GUESS, FC_MODE_WARM, FC_NODE_HELD, FC_NODE_NO_ROOM, core_free, core_new, fc_node, fc_wait,
    node_give_up, node_is, node_set, wait_done, wait_init,
)
from fastcache_ext.policy cimport fc_policy, policy_init
from fastcache_ext.recorder cimport *
from fastcache_ext.requests cimport core_begin, core_hit, core_refuse, core_retry
from fastcache_ext.table cimport table_switch
from fastcache_ext.waiting cimport flying

cdef enum:
    PIECE = 1 << 16         # operations between two looks at signals

STOPS = ("ended", "cut", "lost", "diverged", "strange")


# ---- calls

cdef fc_call *new_call(fc_replay *s, int mode, int n) noexcept nogil:
    cdef fc_call *call = <fc_call *>calloc(1, sizeof(fc_call) + n * sizeof(fc_node))
    if call == NULL:
        return NULL
    call.nodes = <fc_node *>(call + 1)
    wait_init(&call.w, s.c, mode, 0, call.nodes, n)
    call.next = s.calls
    s.calls = call
    s.n_calls += 1
    return call


cdef void let_go(fc_replay *s, fc_wait *w) noexcept nogil:
    """Leases end when the records say that a search saw it; until then nothing depends on them."""
    cdef int i
    for i in range(w.n):
        if node_is(&w.nodes[i], FC_NODE_HELD):
            node_give_up(s.c, &w.nodes[i])


cdef void sweep(fc_replay *s, bint every) noexcept nogil:
    """Forget calls in which nobody waits any more; now and then, so that a landing need not look for them."""
    cdef fc_call **place = &s.calls
    cdef fc_call *call
    if not every and s.n_calls < s.sweep_at:
        return
    while place[0] != NULL:
        call = place[0]
        if every or call.w.pending == 0:
            place[0] = call.next
            wait_done(&call.w, s.c)
            free(call)
            s.n_calls -= 1
        else:
            place = &call.next
    s.sweep_at = 2 * s.n_calls + 64


# ---- the operations

cdef bint batch(fc_replay *s, int mode, int predictor, int32_t n) noexcept nogil:
    """False: out of memory."""
    cdef fc_call *call
    cdef int64_t j = s.at + 1
    cdef int32_t i = 0, key
    cdef int kind
    if n < 1 or n > s.c.table.n_keys or mode > FC_MODE_WARM or predictor >= EV_PREDICTORS:
        s.stop = STRANGE
        return True
    call = new_call(s, mode, n)
    if call == NULL:
        return False
    if mode == FC_MODE_GUESS:
        call.w.predictor = predictor
    while i < n and j < s.n:
        kind = s.records[j] & 255
        if kind == T_REQUEST:
            key = <int32_t>(s.records[j] >> 32)
            if key < 0 or key >= s.c.table.n_keys:
                s.stop = STRANGE
                return True
            call.nodes[i].key = key
            i += 1
        elif kind < T_LANDED or kind == T_GAP or kind == T_END:
            break
        j += 1
    if i < n:
        s.stop = CUT if j >= s.n else STRANGE
        return True
    core_begin(s.c, &call.w)
    let_go(s, &call.w)
    sweep(s, False)
    return True


cdef void single(fc_replay *s, int32_t key) noexcept nogil:
    cdef int32_t slot = core_hit(s.c, key)
    if slot >= 0:
        lease_drop(s.c.arena, slot)
    else:
        diverge(s, record(T_BATCH, FC_MODE_DEMAND, 0, 1))       # no hit: requests.pyx would begin a batch


cdef bint retry(fc_replay *s, int32_t key, bint private) noexcept nogil:
    cdef fc_call *call = new_call(s, FC_MODE_DEMAND, 1)
    cdef fc_private *p = NULL
    cdef int error = 0
    if call == NULL:
        return False
    call.nodes[0].key = key
    call.nodes[0].asked = 1
    node_set(&call.nodes[0], FC_NODE_NO_ROOM)
    if private:
        p = private_new(s.c.arena, key, 1, -1, &error)
        if p == NULL:
            return False
    core_retry(s.c, &call.w, &call.nodes[0], p)
    let_go(s, &call.w)
    sweep(s, False)
    return True


cdef bint landed(fc_replay *s, fc_load *load, int error) noexcept nogil:
    cdef fc_node *node = <fc_node *>load.waiters
    cdef fc_node **waiters
    cdef int32_t i, n = 0
    waiters = <fc_node **>malloc((load.waits + 1) * sizeof(fc_node *))
    if waiters == NULL:
        return False
    while node != NULL:
        waiters[n] = node
        n += 1
        node = node.next
    queue_unlink(&s.c.queue, load)
    finish(s.c, load, error)
    for i in range(n):
        if node_is(waiters[i], FC_NODE_HELD):
            node_give_up(s.c, waiters[i])
    free(waiters)
    sweep(s, False)
    return True


cdef void left(fc_replay *s, fc_load *load, int phase) noexcept nogil:
    cdef fc_node *node = <fc_node *>load.waiters
    while node != NULL and (node.wait.mode != FC_MODE_DEMAND or node.phase != phase):
        node = node.next
    if node == NULL:
        s.stop = STRANGE
        return
    fc_add32(&node.wait.pending, -1)    # nobody sleeps on it; it says when the call can be forgotten
    node_give_up(s.c, node)


cdef bint switch(fc_replay *s, int number, int32_t n) noexcept nogil:
    """Another policy, numbered as in the file, and the slots that go over to it, in the order of the records."""
    cdef fc_policy fresh
    cdef int32_t *order
    cdef uint8_t *seen
    cdef int32_t i, slot
    cdef int kind = s.kinds[number] if number < MAX_KINDS else -1
    if kind < 0 or n < 0 or n > s.c.table.n_slots or n > s.n - s.at - 1:
        s.stop = STRANGE
        return True
    order = <int32_t *>malloc((n + 1) * sizeof(int32_t))
    seen = <uint8_t *>calloc(s.c.table.n_slots + 1, 1)
    for i in range(n if order != NULL and seen != NULL else 0):
        slot = <int32_t>(s.records[s.at + 1 + i] >> 32)
        if ((s.records[s.at + 1 + i] & 255) != T_MOVED or slot < 0 or slot >= s.c.table.n_slots or seen[slot]
                or s.c.table.key_of[slot] < 0):
            s.stop = STRANGE
            break
        seen[slot] = 1
        order[i] = slot
    if order == NULL or seen == NULL or policy_init(&fresh, kind, &s.c.table.policy.v) != 0:
        free(order)
        free(seen)
        return False
    if s.stop < 0:
        s.at += n + 1
        table_switch(&s.c.table, &fresh, order, n)
    fresh.destroy(&fresh)
    free(order)
    free(seen)
    return True


cdef bint step(fc_replay *s) noexcept nogil:
    """Do again what the next record began. False: out of memory."""
    cdef uint64_t rec = s.records[s.at]
    cdef int kind = rec & 255, flags = (rec >> 8) & 255, aux = <uint16_t>(rec >> 16)
    cdef int32_t value = <int32_t>(rec >> 32)
    cdef fc_load *load = NULL
    cdef fc_call *call
    s.op = s.at
    if kind == T_BATCH:
        return batch(s, flags, aux, value)
    if kind == T_TOKEN:
        s.at += 1                       # no counter depends on it
        return True
    if kind == T_PHASE or kind == T_TIMED_OUT:
        s.at += 1
        if aux >= FC_PHASES:
            s.stop = STRANGE
        elif kind == T_PHASE:
            counters_phase(&s.c.counters, aux)
        else:
            count_in(&s.c.counters, aux, FC_FIRST_ERROR + FC_ERROR_TIMEOUT, 1)
        return True
    if kind == T_SWITCH:
        return switch(s, aux, value)
    if kind == T_COUNTER or kind == T_END or kind == T_GAP:
        s.stop = LOST if kind == T_GAP else ENDED
        return True
    if value < 0 or value >= s.c.table.n_keys:
        s.stop = STRANGE
        return True
    if kind == T_SINGLE:
        single(s, value)
        return True
    if kind == T_PIN or kind == T_UNPIN:
        s.at += 1                       # no counter depends on it but through leases, and through who may trade
        if s.c.table.cls_of[value] < 16:
            s.c.table.n_pinned[s.c.table.cls_of[value]] += 1 if kind == T_PIN else -1
        return True
    if kind == T_RETRY:
        return retry(s, value, aux & 1)
    if kind == T_REFUSED:
        call = new_call(s, FC_MODE_DEMAND, 1)
        if call == NULL:
            return False
        call.nodes[0].key = value
        core_refuse(s.c, &call.w, &call.nodes[0], aux)
        sweep(s, False)
        return True
    if kind == T_LANDED or kind == T_LEFT or kind == T_CANCEL or kind == T_BEGUN:
        load = flying(s.c, value)
    if load == NULL or (kind == T_LANDED and aux == 0 and load.waiting) or (kind == T_BEGUN and not load.waiting):
        diverge(s, 0)                   # nothing of the kind is under way here
    elif kind == T_BEGUN:
        guess_begin(s.c, load)
    elif kind == T_LANDED:
        return landed(s, load, aux)
    elif kind == T_LEFT:
        left(s, load, aux)
    else:
        s.at += 1
        queue_unlink(&s.c.queue, load)
        load.error = FC_ECANCELLED
    return True


cdef class Replay:
    """A store without files that does what records say. One thread at a time."""
    cdef fc_replay s
    cdef fc_arena *arena
    cdef bint by_hand

    def __cinit__(self, layers, cls_of, class_slots, payload, policy, policies, bint by_hand, slabs=None):
        """`layers`: experts per layer; `cls_of`: size class per key (bytes); `payload`: bytes per key; `policies`: names;
        `slabs`: what classes trade, as a store takes it."""
        cdef int64_t bytes_[16]
        cdef int32_t slots_[16]
        cdef int32_t *first
        cdef int32_t *ext_first
        cdef int64_t *span
        cdef fc_extent *extents
        cdef fc_slabs plan
        cdef bytes classes = bytes(cls_of)
        cdef int32_t i, n = len(classes), n_extents = 0, n_layers = len(layers)
        cdef int error = 0
        if len(class_slots) > 16 or sum(layers) != n or len(payload) != n:
            raise ValueError("layers, classes and sizes do not fit together")
        if any(count < 0 for count in class_slots) or sum(class_slots) > n:
            raise ValueError("a number of slots that no store of these experts has")
        slabs_read(&plan, slabs)
        plan.nbytes = FC_MAX_PER_SLAB * 4096       # address space: nothing is read
        for i in range(len(class_slots)):
            bytes_[i], slots_[i] = 4096, class_slots[i]
        first = <int32_t *>calloc(n_layers + 1, sizeof(int32_t))
        ext_first = <int32_t *>calloc(n + 1, sizeof(int32_t))
        span = <int64_t *>calloc(n + 1, sizeof(int64_t))
        extents = <fc_extent *>calloc(n + 1, sizeof(fc_extent))
        try:
            if first == NULL or ext_first == NULL or span == NULL or extents == NULL:
                raise MemoryError
            for i in range(n_layers):
                first[i + 1] = first[i] + <int32_t>layers[i]
            for i in range(n):          # one extent says how large an expert is; nothing is read
                if payload[i] > 0:
                    extents[n_extents].nbytes = payload[i]
                    n_extents += 1
                ext_first[i + 1] = n_extents
            self.arena = arena_new(bytes_, slots_, len(class_slots), &plan, FC_HUGE_OFF, 4096, &error)
            if self.arena != NULL:
                self.s.c = core_new(self.arena, n_layers, first, <const uint8_t *><const char *>classes, POLICIES[policy],
                                    extents, n_extents, ext_first, span, NULL, 0, 1, 1 << 20, 1 << 20)
            if self.s.c == NULL:
                raise MemoryError
        finally:
            free(first)
            free(ext_first)
            free(span)
            free(extents)
        self.s.c.by_hand = by_hand
        for i in range(MAX_KINDS):
            self.s.kinds[i] = POLICIES.get(policies[i], -1) if i < len(policies) else -1
        checker_init(&self.s)

    def __dealloc__(self):
        cdef fc_load *load
        if self.s.c != NULL:
            self.s.c.recorder = NULL
            self.s.c.table.policy.witness = NULL
            sweep(&self.s, True)
            while self.s.c.privates != NULL:
                load = self.s.c.privates
                self.s.c.privates = load.newer
                private_unref(<fc_private *>load.priv)
                free(load)
            core_free(self.s.c)
        arena_unref(self.arena)

    def run(self, records):
        """Replay `records` (a buffer of 8-byte records). Returns (how it stopped, at which record, what came instead of it).

        How: one of STOPS. What came instead is a record, where it diverged; 0: nothing.
        """
        cdef Py_buffer view
        cdef bint memory = True
        cdef int _steps
        PyObject_GetBuffer(records, &view, PyBUF_SIMPLE)
        self.s.records = <const uint64_t *>view.buf
        self.s.n = view.len // 8
        self.s.at = 0
        self.s.stop = -1
        self.s.c.recorder = &self.s.hooks
        self.s.c.table.policy.witness = &self.s.hooks.witness
        try:
            while self.s.stop < 0 and memory:
                with nogil:
                    for _steps in range(PIECE):
                        if self.s.stop >= 0 or not memory:
                            break
                        if self.s.at >= self.s.n:
                            self.s.stop = CUT
                        else:
                            memory = step(&self.s)
                PyErr_CheckSignals()
        finally:
            PyBuffer_Release(&view)
        if not memory:
            raise MemoryError
        return STOPS[self.s.stop], self.s.at, self.s.instead

    def rows(self):
        """The counters, [phase][number]."""
        cdef int i, p
        return [[self.s.c.counters.rows[p][i] for i in range(N_COUNTERS)] for p in range(FC_PHASES)]

    def layers(self):
        """Per layer, in order: {name: count}, the phases added."""
        cdef int64_t *n = self.s.c.counters.layers
        cdef int i, j, p, n_layers = self.s.c.counters.n_layers
        return [{LAYER_NAMES[j]: sum([n[(p * n_layers + i) * N_LAYER_COUNTERS + j] for p in range(FC_PHASES)])
                 for j in range(N_LAYER_COUNTERS)} for i in range(n_layers)]
