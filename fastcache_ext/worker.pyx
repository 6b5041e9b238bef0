"""The store's housekeeper: one native thread that never takes the GIL.

May import libc, arena, monitor, auto, ghosts, threads and uring.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t

from fastcache_ext.arena cimport arena_lock, arena_populate, fc_arena
from fastcache_ext.atomics cimport fc_load32, fc_store32
from fastcache_ext.auto cimport ghosts_work
from fastcache_ext.ghosts cimport GHOSTS_PIECE, fc_ghosts, ghosts_waiting
from fastcache_ext.landing cimport move_some
from fastcache_ext.threads cimport *
from fastcache_ext.uring cimport uring_kick, uring_offer, uring_registered

cdef int64_t STEP = 2 << 20             # bytes populated at once: whoever maps memory meanwhile (malloc does) waits as long
cdef int64_t PAUSE_NS = 20000000        # between two looks at the ring's registration
cdef int64_t REGISTRATION_NS = 5000000000   # how long that is waited for
cdef int64_t NEVER = 0x7FFFFFFFFFFFFFFF
cdef int64_t GHOST_SHARE = 20           # ghosts get one part in so many of a processor's time
cdef int64_t SAVED_NS = 400000000       # and what they have not used of this long is theirs at once
cdef int64_t LOOK_NS = 4000000          # between two looks at what they have heard
cdef int IDLE_LOOKS = 100               # after so many in vain there are none until they wake


cdef int64_t look_at(const fc_worker *w) noexcept nogil:
    """When to look what the ghosts have heard: a monotonic time. Half a ring is more than there should be."""
    return w.rest_until_ns if ghosts_waiting(w.core.ghosts) >= w.core.ghosts.room // 2 else w.look_ns


cdef int64_t ghosts_from(const fc_worker *w) noexcept nogil:
    """The same, or NEVER, for whom they wake. The mutex is held."""
    return NEVER if w.core.ghosts == NULL or w.core.ghosts.asleep else look_at(w)


cdef int nap(fc_worker *w, int64_t until) noexcept nogil:
    """Sleep until there is something to move or to serve, or to stop, or the time is over."""
    cdef int64_t now, wake
    pthread_mutex_lock(&w.core.mutex)
    while w.core.to_move == NULL and not fc_load32(&w.stop):
        now = fc_now_ns()
        wake = min(until, ghosts_from(w))
        if now >= wake:
            break
        if wake == NEVER:
            pthread_cond_wait(&w.core.chores, &w.core.mutex)
        else:
            fc_cond_until(&w.core.chores, &w.core.mutex, wake)
    pthread_mutex_unlock(&w.core.mutex)
    return fc_load32(&w.stop)


cdef void doze(fc_worker *w) noexcept nogil:
    """Nothing was asked for in a while: look no more until something is."""
    cdef fc_ghosts *g = w.core.ghosts
    pthread_mutex_lock(&w.core.mutex)
    g.asleep = ghosts_waiting(g) == 0
    pthread_mutex_unlock(&w.core.mutex)


cdef bint haunt(fc_worker *w) noexcept nogil:
    """Serve a piece of the traffic to the ghosts, unless they have had their share of the time. False: nothing to do."""
    cdef fc_ghosts *g = w.core.ghosts
    cdef int64_t start = fc_now_ns(), now
    if g == NULL or start < look_at(w):
        return False
    if ghosts_waiting(g) == 0:
        w.look_ns = start + LOOK_NS
        w.idle_looks += 1
        if w.idle_looks >= IDLE_LOOKS:
            doze(w)
        return False
    w.idle_looks = 0
    ghosts_work(w.core, False)
    now = fc_now_ns()
    w.rest_until_ns = max(w.rest_until_ns, now - SAVED_NS) + GHOST_SHARE * (now - start)
    w.look_ns = max(w.rest_until_ns, now if ghosts_waiting(g) >= GHOSTS_PIECE else now + LOOK_NS)
    return True


cdef bint chores(fc_worker *w) noexcept nogil:
    """Whatever waits; moves first, for each holds up a load."""
    while True:
        while move_some(w.core):
            pass
        if fc_load32(&w.stop) or not haunt(w):
            return not fc_load32(&w.stop)


cdef bint offer(fc_worker *w, int32_t piece, uint8_t *base, int64_t nbytes) noexcept nogil:
    """Offer a piece to the ring and have its thread look, whether it sleeps in the kernel or in take(). False: no."""
    cdef bint taken
    pthread_mutex_lock(&w.core.mutex)
    taken = w.ring != NULL and uring_offer(w.ring, piece, base, nbytes) == 0
    if taken:
        w.core.poke = 1
        pthread_cond_broadcast(&w.core.work)
        uring_kick(w.ring)
    pthread_mutex_unlock(&w.core.mutex)
    return taken


cdef int registered(fc_worker *w, int *error) noexcept nogil:
    cdef int n = 0
    error[0] = 0
    pthread_mutex_lock(&w.core.mutex)
    if w.ring != NULL:
        n = uring_registered(w.ring, error)
    pthread_mutex_unlock(&w.core.mutex)
    return n


cdef void worker_leave_ring(fc_worker *w) noexcept nogil:
    pthread_mutex_lock(&w.core.mutex)
    w.ring = NULL
    pthread_mutex_unlock(&w.core.mutex)


cdef bint furnish(fc_worker *w, int32_t *offered) noexcept nogil:
    """Populate, lock and offer the arena piece by piece. False when told to stop."""
    cdef fc_arena *a = w.core.arena
    cdef int64_t at = 0, end = 0, step
    cdef int32_t piece
    cdef int rc
    for piece in range(a.n_pieces):
        end += a.piece_bytes[piece]
        while at < end:
            if not chores(w):
                return False
            step = min(STEP, end - at)
            rc = arena_populate(a, at, step)
            if rc != 0:
                fc_store32(&w.populate_errno, rc)
                return True
            if w.mlock and not w.register_ and fc_load32(&w.mlock_errno) == 0:
                fc_store32(&w.mlock_errno, arena_lock(a, at, step))
            at += step
        if w.register_ and offer(w, piece, a.piece_base[piece], a.piece_bytes[piece]):
            offered[0] = piece + 1
    return True


cdef bint lock_unregistered(fc_worker *w, int32_t offered) noexcept nogil:
    """Wait for the ring to have registered the pieces or given up; then lock the rest. False when told to stop."""
    cdef fc_arena *a = w.core.arena
    cdef int error = 0, done = 0
    cdef int32_t piece
    cdef int64_t at = 0, until = fc_now_ns() + REGISTRATION_NS
    while fc_now_ns() < until:
        done = registered(w, &error)
        if done >= offered or error != 0:
            break
        if not chores(w) or nap(w, fc_now_ns() + PAUSE_NS):
            return False
    for piece in range(a.n_pieces):
        if piece >= done and w.mlock and fc_load32(&w.mlock_errno) == 0:
            fc_store32(&w.mlock_errno, arena_lock(a, at, a.piece_bytes[piece]))
        at += a.piece_bytes[piece]
    return True


cdef void *run(void *arg) noexcept nogil:
    cdef fc_worker *w = <fc_worker *>arg
    cdef int32_t offered = 0
    if furnish(w, &offered) and (not w.register_ or lock_unregistered(w, offered)):
        fc_store32(&w.settled, 1)
    while chores(w):
        nap(w, NEVER)
    while move_some(w.core):
        pass
    return NULL


cdef int worker_start(fc_worker *w) noexcept nogil:
    cdef int rc = fc_spawn(&w.thread, run, w, b"fastcache-work")
    w.started = rc == 0
    return rc


cdef int worker_join(fc_worker *w, int64_t timeout_ns) noexcept nogil:
    cdef int rc
    if not w.started:
        return 0
    pthread_mutex_lock(&w.core.mutex)
    fc_store32(&w.stop, 1)
    pthread_cond_broadcast(&w.core.chores)
    pthread_mutex_unlock(&w.core.mutex)
    rc = fc_join_until(w.thread, timeout_ns)
    w.started = rc != 0
    return rc
