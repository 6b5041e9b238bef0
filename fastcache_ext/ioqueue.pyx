"""Extents -> aligned chunk reads, in two classes; and what a completion means.

Owns the order of reads and the arithmetic of windows, short reads and fallbacks. Knows no lock, no thread and no system call.
May import libc and atomics.
"""
from libc.errno cimport EAGAIN, EFAULT, EINTR, EINVAL, EOPNOTSUPP, EPERM
from libc.stdint cimport int32_t, int64_t

from fastcache_ext.atomics cimport fc_load32, fc_store32

cdef enum:
    MAX_STALLS = 64         # tries in a row that bring nothing (EINTR, EAGAIN, or a short read below one alignment unit)
    MAX_SHORT_STALLS = 8


cdef void queue_init(fc_queue *q, int64_t chunk, int64_t guess_chunk, int64_t guess_limit) noexcept nogil:
    q.head[0] = q.head[1] = q.tail[0] = q.tail[1] = NULL
    q.chunk = chunk
    q.guess_chunk = guess_chunk
    q.guess_bytes = 0
    q.guess_limit = guess_limit
    q.ioprio[0] = q.ioprio[1] = 0
    q.guess_ops = q.demand_ops = q.promoted = 0
    q.guess_ops_limit = 1
    q.next_id = 1


cdef void queue_push(fc_queue *q, fc_load *load) noexcept nogil:
    cdef int k = load.klass
    load.queued = 1
    load.next = NULL
    load.prev = q.tail[k]
    if k == FC_GUESS and not load.waiting and q.head[k] != NULL:
        load.prev = NULL                    # it holds a slot: before those that wait for one
        load.next = q.head[k]
        q.head[k].prev = load
        q.head[k] = load
        return
    if q.tail[k] != NULL:
        q.tail[k].next = load
    else:
        q.head[k] = load
    q.tail[k] = load


cdef void queue_unlink(fc_queue *q, fc_load *load) noexcept nogil:
    cdef int k = load.klass
    if not load.queued:
        return
    if load.prev != NULL:
        load.prev.next = load.next
    else:
        q.head[k] = load.next
    if load.next != NULL:
        load.next.prev = load.prev
    else:
        q.tail[k] = load.prev
    load.prev = load.next = NULL
    load.queued = 0


cdef bint queue_promote(fc_queue *q, fc_load *load) noexcept nogil:
    """Move what is left of a guess to the demand class. True if something was queued."""
    cdef bint was = load.queued
    if load.klass == FC_DEMAND:
        return False
    queue_unlink(q, load)
    load.klass = FC_DEMAND
    q.promoted += load.ops
    if was:
        queue_push(q, load)
    return was


cdef void queue_moved(fc_queue *q, const fc_load *load, fc_load *to) noexcept nogil:
    cdef int k = load.klass
    if not load.queued:
        return
    if to.prev != NULL:
        to.prev.next = to
    else:
        q.head[k] = to
    if to.next != NULL:
        to.next.prev = to
    else:
        q.tail[k] = to


cdef int64_t load_cut(const fc_load *load) noexcept nogil:
    cdef int64_t nbytes = load.cut
    cdef int32_t i
    for i in range(load.extent):
        nbytes += load.extents[i].nbytes
    return min(nbytes, load.payload)


cdef bint queue_empty(const fc_queue *q) noexcept nogil:
    return q.head[0] == NULL and q.head[1] == NULL


cdef fc_load *queue_due(const fc_queue *q) noexcept nogil:
    if q.head[FC_DEMAND] != NULL:
        return q.head[FC_DEMAND]
    if (q.demand_ops > 0 or q.guess_ops >= q.guess_ops_limit
            or (q.guess_ops > 0 and q.guess_bytes + q.guess_chunk > q.guess_limit)):
        return NULL
    return q.head[FC_GUESS]


cdef bint queue_next(fc_queue *q, fc_file *files, fc_op *op) noexcept nogil:
    """Cut the next chunk into `op`: demands first, guesses while no demand is being read and their bytes in flight allow.

    False when there is none.
    """
    cdef int k
    cdef fc_load *load = queue_due(q)
    cdef const fc_extent *x
    cdef fc_file *file
    cdef int64_t window, start, end
    if load == NULL:
        return False
    k = load.klass
    x = &load.extents[load.extent]
    file = &files[x.file]
    # The window is the aligned superset; bytes of it that lie before the payload or after it are padding.
    start = x.offset - x.offset % file.align
    window = (x.offset + x.nbytes + file.align - 1) // file.align * file.align - start
    end = min(load.cut + (q.chunk if k == FC_DEMAND else q.guess_chunk), window)
    op.load = load
    op.file = file
    op.lo = max(x.offset, start + load.cut)
    op.hi = min(x.offset + x.nbytes, start + end)
    op.direct = file.memory == NULL and file.fd_direct >= 0 and fc_load32(&file.direct) != 0
    if op.direct:
        op.fd = file.fd_direct
        op.offset = start + load.cut
        op.nbytes = end - load.cut
        op.dest = load.dest + x.place + load.cut
        # What lies past the end of the file may be padding, never payload.
        op.expected = max(min(op.nbytes, file.size - op.offset), op.hi - op.offset)
    else:
        op.fd = file.fd_buffered
        op.offset = op.lo
        op.nbytes = op.expected = op.hi - op.lo
        op.dest = load.dest + x.place + (op.lo - start)
    op.buf_index = load.buf_index
    op.stalls = 0
    op.klass = k
    op.id = q.next_id
    q.next_id += 1
    op.submitted = op.nbytes
    op.back_ns = 0
    op.charge = end - load.cut if k == FC_GUESS else 0
    q.guess_bytes += op.charge
    q.guess_ops += k == FC_GUESS
    q.demand_ops += k == FC_DEMAND
    # While somebody waits for a read that was given away as a guess, no other is put before it.
    op.ioprio = fc_load32(&q.ioprio[FC_GUESS if q.promoted > 0 else k])
    fc_store32(&op.cancel, FC_CANCEL_NOT)
    load.ops += 1
    load.cut = end
    if end == window:
        load.extent += 1
        load.cut = 0
        if load.extent == load.n_extents:
            queue_unlink(q, load)
    return True


cdef void queue_settled(fc_queue *q, const fc_op *op) noexcept nogil:
    q.guess_bytes -= op.charge
    q.guess_ops -= op.klass == FC_GUESS
    q.demand_ops -= op.klass == FC_DEMAND
    q.promoted -= op.klass == FC_GUESS and op.load.klass == FC_DEMAND


cdef int op_settle(fc_op *op, int64_t res, int32_t direct_required) noexcept nogil:
    cdef int verdict = settle(op, res, direct_required)
    if verdict == FC_AGAIN:
        op.submitted += op.nbytes
    return verdict


cdef int settle(fc_op *op, int64_t res, int32_t direct_required) noexcept nogil:
    """Credit `res` to `op`. FC_FINISHED, FC_AGAIN (op now asks for what is missing), or -errno / -FC_ESHORT."""
    cdef int64_t progress, at
    if res < 0:
        if res == -EINTR or res == -EAGAIN:
            op.stalls += 1
            return FC_AGAIN if op.stalls < MAX_STALLS else <int>res
        if res == -EPERM and op.ioprio != 0:    # the process has given up the right to this priority
            op.ioprio = 0
            return FC_AGAIN
        # Direct I/O refused at read time: serve this file buffered from here on, with the unpadded range. EIO is no refusal.
        if op.direct and not direct_required and (res == -EINVAL or res == -EOPNOTSUPP or res == -EFAULT):
            fc_store32(&op.file.direct_errno, <int32_t>-res)
            fc_store32(&op.file.direct, 0)
            at = max(op.offset, op.lo)
            if at >= op.hi:
                return FC_FINISHED
            op.dest += at - op.offset
            op.offset = at
            op.nbytes = op.expected = op.hi - at
            op.fd = op.file.fd_buffered
            op.direct = 0
            op.stalls = 0
            return FC_AGAIN
        return <int>res
    if res >= op.expected:
        return FC_FINISHED
    if op.offset + res >= op.hi:
        return FC_FINISHED              # what is missing is padding
    progress = res - res % op.file.align if op.direct else res      # never resume at an unaligned offset: read the piece again
    if progress == 0:
        op.stalls += 1
        if res == 0 or op.stalls >= MAX_SHORT_STALLS:
            return -FC_ESHORT
        return FC_AGAIN
    op.stalls = 0
    op.dest += progress
    op.offset += progress
    op.nbytes -= progress
    op.expected -= progress
    return FC_AGAIN
