"""The pread engine: n native threads, one read each at a time, over the same port as the ring.

Owns its threads. Knows no queue, slot or lock: only the port's two functions. May import ioqueue, threads and libc.
After fork the child has none of the threads and must not call anything here; the core checks the process id.
"""

from libc.errno cimport EINVAL, ENOMEM, errno
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from fastcache_ext.ioqueue cimport FC_AGAIN, FC_STOP, fc_op, fc_port
from fastcache_ext.threads cimport fc_join_until, fc_now_ns, fc_set_ioprio, fc_spawn, pthread_t

cdef extern from "unistd.h" nogil:
    ssize_t pread(int fd, void *buffer, size_t nbytes, int64_t offset)

cdef enum:
    MAX_THREADS = 256
    MAX_READ = 1 << 30          # bytes: the kernel cuts any single read just below 2 GiB

ctypedef struct fc_worker:
    pthread_t thread
    const fc_port *port         # the engine's copy
    int alive                   # 1 until joined

ctypedef struct fc_pread_state:
    fc_port port
    int n_threads               # started
    fc_worker *workers          # [n_threads]


cdef int64_t op_read(const fc_op *op) noexcept nogil:
    """Do the read once: bytes read, or -errno."""
    cdef int64_t n = min(op.nbytes, <int64_t>MAX_READ)
    if op.file.memory != NULL:
        n = min(n, op.file.size - op.offset)
        if n <= 0:
            return 0
        memcpy(op.dest, op.file.memory + op.offset, <size_t>n)
        return n
    n = pread(op.fd, op.dest, <size_t>n, op.offset)
    return -errno if n < 0 else n


cdef void *worker_run(void *arg) noexcept nogil:
    cdef const fc_port *port = (<fc_worker *>arg).port
    cdef fc_op *op
    cdef int n
    cdef int32_t ioprio = 0
    while True:
        n = port.take(port.ctx, &op, 1, 1)
        if n == FC_STOP:
            return NULL
        if n > 0:
            if op.ioprio != ioprio:             # 0.2 to 1 us, against 400 us of a guess's read
                ioprio = op.ioprio
                fc_set_ioprio(ioprio)           # refused: the read goes as it is
            while port.settle(port.ctx, op, op_read(op)) == FC_AGAIN:
                pass            # settle() bounds the tries without progress


cdef fc_pread *pread_start(const fc_port *port, int n_threads, int *error) noexcept nogil:
    cdef fc_pread_state *engine
    cdef int i, rc
    error[0] = EINVAL
    if n_threads < 1:
        return NULL
    n_threads = min(n_threads, <int>MAX_THREADS)
    error[0] = ENOMEM
    engine = <fc_pread_state *>calloc(1, sizeof(fc_pread_state))
    if engine == NULL:
        return NULL
    engine.workers = <fc_worker *>calloc(<size_t>n_threads, sizeof(fc_worker))
    if engine.workers == NULL:
        free(engine)
        return NULL
    engine.port = port[0]
    rc = 0
    for i in range(n_threads):
        engine.workers[i].port = &engine.port
        rc = fc_spawn(&engine.workers[i].thread, worker_run, &engine.workers[i], "fastcache-pread")
        if rc != 0:
            break               # a limit on threads: fewer of them still serve every read
        engine.workers[i].alive = 1
        engine.n_threads = i + 1
    if engine.n_threads == 0:
        error[0] = rc
        free(engine.workers)
        free(engine)
        return NULL
    error[0] = 0
    return <fc_pread *>engine


cdef int pread_join(fc_pread *threads, int64_t timeout_ns) noexcept nogil:
    cdef fc_pread_state *engine = <fc_pread_state *>threads
    cdef int64_t end = fc_now_ns() + timeout_ns
    cdef int64_t left = -1
    cdef int i, late = 0
    for i in range(engine.n_threads):
        if not engine.workers[i].alive:
            continue
        if timeout_ns >= 0:
            left = max(end - fc_now_ns(), <int64_t>0)
        late = fc_join_until(engine.workers[i].thread, left)
        if late != 0:
            return late
        engine.workers[i].alive = 0
    free(engine.workers)
    free(engine)
    return 0


cdef int pread_threads(const fc_pread *threads) noexcept nogil:
    return (<const fc_pread_state *>threads).n_threads
