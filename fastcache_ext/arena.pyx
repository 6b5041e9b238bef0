"""One anonymous mapping cut into aligned slots, with lock-free lease counts.

Owns memory: mapping, huge pages, population, mlock, pass-through buffers, and when each is unmapped.
Knows no key, no policy and no read. May import libc and atomics.
"""
from libc.errno cimport errno, EINVAL, ENOMEM
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.mman cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, PROT_READ, PROT_WRITE, madvise, mlock, mmap, munmap,
)
from posix.unistd cimport _SC_PAGESIZE, sysconf

from fastcache_ext.atomics cimport (
    fc_add32, fc_add64, fc_cas32, fc_cas64, fc_load32, fc_load64, fc_load8, fc_store32, fc_swap8,
)

cdef extern from *:
    """
    #include <pthread.h>
    #include <sys/mman.h>
    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23
    #endif
    #ifndef MAP_HUGETLB
    #define MAP_HUGETLB 0x40000
    #endif
    static int32_t fc_forks;                /* how many forks deep this process is: compared, never reset */
    static void fc_count_fork(void) { __atomic_add_fetch(&fc_forks, 1, __ATOMIC_SEQ_CST); }
    static int fc_watch_forks(void) { return pthread_atfork(0, 0, fc_count_fork); }
    static const int32_t *fc_fork_word(void) { return &fc_forks; }
    static int32_t fc_fork_count(void) { return __atomic_load_n(&fc_forks, __ATOMIC_RELAXED); }
    /* a write that changes nothing, atomically: a read may be landing on the page meanwhile */
    static void fc_touch(unsigned char *p) { __atomic_fetch_or(p, 0, __ATOMIC_RELAXED); }
    """
    const int MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_DONTFORK, MADV_POPULATE_WRITE, MAP_HUGETLB
    int fc_watch_forks() noexcept nogil
    const int32_t *fc_fork_word() noexcept nogil
    int32_t fc_fork_count() noexcept nogil
    void fc_touch(unsigned char *p) noexcept nogil

cdef int64_t HUGE = 2 << 20
cdef int64_t PIECE = 1 << 30

if fc_watch_forks() != 0:
    raise MemoryError("pthread_atfork")


cdef int fork_generation() noexcept nogil:
    return fc_fork_count()


cdef const int32_t *fork_word() noexcept nogil:
    return fc_fork_word()


cdef uint8_t *map_aligned(int64_t nbytes, int64_t align, int extra, uint8_t **mapping, int64_t *mapped) noexcept nogil:
    cdef int64_t span = nbytes + (align if align > 4096 and not (extra & MAP_HUGETLB) else 0)
    cdef uintptr_t start
    cdef void *p = mmap(NULL, <size_t>span, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | (extra if extra & MAP_HUGETLB else MAP_NORESERVE), -1, 0)
    if p == MAP_FAILED:
        return NULL
    # A child after fork gets a hole where the arena was: direct reads never meet copy-on-write, and memory never doubles.
    madvise(p, <size_t>span, MADV_DONTFORK)
    start = <uintptr_t>p
    mapping[0] = <uint8_t *>p
    mapped[0] = span
    return <uint8_t *>((start + <uintptr_t>align - 1) & ~(<uintptr_t>align - 1)) if span > nbytes else <uint8_t *>p


cdef int64_t measure(const int64_t *bytes, const int32_t *slots, int n_classes, const fc_slabs *slabs,
                     int64_t *n_slots) noexcept nogil:
    """Bytes of an arena, and how many slots can be in it at one time or another; -1: not a possible one."""
    cdef int64_t total = 0, n = 0, own = 0
    cdef int32_t c
    if n_classes < 0 or n_classes > FC_MAX_CLASSES or (slabs != NULL and (slabs.n < 0 or slabs.nbytes < 0)):
        return -1
    for c in range(n_classes):
        if bytes[c] < 0 or slots[c] < 0:
            return -1
        total += bytes[c] * slots[c]
        n += slots[c]
        if slabs != NULL:
            if (slabs.own[c] < 0 or slabs.own[c] > slabs.most[c] or slabs.most[c] > slabs.n
                    or slabs.per[c] < (slabs.most[c] > 0) or slabs.per[c] > FC_MAX_PER_SLAB
                    or (slabs.most[c] > 0 and slabs.per[c] * bytes[c] > slabs.nbytes)):
                return -1
            own += slabs.own[c]
            n += <int64_t>slabs.most[c] * slabs.per[c]
    if n >= (1 << 30) or (slabs != NULL and own != slabs.n):
        return -1
    n_slots[0] = n
    return total + (slabs.n * slabs.nbytes if slabs != NULL else 0)


cdef void cut_slabs(fc_arena *a, int64_t at, int64_t piece_start) noexcept nogil:
    """Give the slots of slabs, which begin at byte `at`, their places. A piece is whole slabs."""
    cdef fc_slabs *k = &a.slabs
    cdef int64_t from_ = at
    cdef int32_t c, j, s, slab
    for c in range(a.n_classes):
        a.slab_at[c] = a.slab_at[c - 1] + k.own[c - 1] if c > 0 else 0
    for slab in range(k.n):
        if at + k.nbytes - piece_start > PIECE and at > piece_start:
            a.n_pieces += 1
            piece_start = at
        if a.piece_base[a.n_pieces] == NULL:
            a.piece_base[a.n_pieces] = a.base + piece_start
        at += k.nbytes
        a.piece_bytes[a.n_pieces] = at - piece_start
        for c in range(a.n_classes):
            s = slab_first(a, c, slab)
            for j in range(k.per[c] if s >= 0 else 0):
                a.addr[s + j] = a.base + from_ + slab * k.nbytes + j * a.class_bytes[c]
                a.piece[s + j] = <uint16_t>a.n_pieces


cdef fc_arena *arena_new(const int64_t *bytes, const int32_t *slots, int n_classes, const fc_slabs *slabs, int huge,
                         int64_t align, int *error) noexcept nogil:
    cdef fc_arena *a
    cdef int64_t total, n = 0, at = 0, piece_start = 0
    cdef int32_t c, i, s = 0
    error[0] = EINVAL
    total = measure(bytes, slots, n_classes, slabs, &n)
    if total < 0:
        return NULL
    error[0] = ENOMEM
    a = <fc_arena *>calloc(1, sizeof(fc_arena))
    if a == NULL:
        return NULL
    a.refs = 1
    a.page = sysconf(_SC_PAGESIZE)
    a.align = max(a.page, align)
    a.fork_gen = fc_fork_count()
    a.n_classes = n_classes
    a.n_slots = <int32_t>n
    a.nbytes = total
    a.told_head = -1
    a.huge = huge if total >= HUGE or huge == FC_HUGE_TLB else FC_HUGE_OFF
    for i in range(FC_HOLDERS):
        a.holders[i].key = -1
    a.addr = <uint8_t **>calloc(n + 1, sizeof(uint8_t *))
    a.cls = <uint8_t *>calloc(n + 1, 1)
    a.piece = <uint16_t *>calloc(n + 1, sizeof(uint16_t))
    a.leases = <int32_t *>calloc(n + 1, sizeof(int32_t))
    a.parked = <uint8_t *>calloc(n + 1, 1)
    a.told = <uint8_t *>calloc(n + 1, 1)
    a.next_told = <int32_t *>calloc(n + 1, sizeof(int32_t))
    a.piece_base = <uint8_t **>calloc(total // (PIECE // 2) + n_classes + 2, sizeof(uint8_t *))
    a.piece_bytes = <int64_t *>calloc(total // (PIECE // 2) + n_classes + 2, sizeof(int64_t))
    if (a.addr == NULL or a.cls == NULL or a.piece == NULL or a.leases == NULL or a.parked == NULL or a.told == NULL
            or a.next_told == NULL or a.piece_base == NULL or a.piece_bytes == NULL):
        arena_unref(a)
        return NULL
    if total > 0:
        align = max(a.align, HUGE) if total >= HUGE else a.align
        if a.huge == FC_HUGE_TLB:
            a.base = map_aligned((total + HUGE - 1) // HUGE * HUGE, HUGE, MAP_HUGETLB, &a.mapping, &a.mapped)
            if a.base == NULL:
                a.huge_errno = errno
                error[0] = errno
                arena_unref(a)
                return NULL
        else:
            a.base = map_aligned(total, align, 0, &a.mapping, &a.mapped)
            if a.base == NULL:
                error[0] = errno
                arena_unref(a)
                return NULL
            if a.huge == FC_HUGE_THP:
                if madvise(a.base, <size_t>total, MADV_HUGEPAGE) != 0:
                    a.huge_errno = errno
                    a.huge = FC_HUGE_OFF
            else:
                madvise(a.base, <size_t>total, MADV_NOHUGEPAGE)
    if slabs != NULL:
        a.slabs = slabs[0]
    for c in range(n_classes):
        a.class_first[c] = s
        a.class_bytes[c] = bytes[c]
        a.fixed[c] = slots[c]
        for i in range(slots[c] + a.slabs.most[c] * a.slabs.per[c]):
            a.cls[s + i] = <uint8_t>c
        for i in range(slots[c]):
            if at + bytes[c] - piece_start > PIECE and at > piece_start:
                a.n_pieces += 1
                piece_start = at
            if a.piece_base[a.n_pieces] == NULL:
                a.piece_base[a.n_pieces] = a.base + piece_start
            a.addr[s + i] = a.base + at
            a.piece[s + i] = <uint16_t>a.n_pieces
            at += bytes[c]
            a.piece_bytes[a.n_pieces] = at - piece_start
        s += slots[c] + a.slabs.most[c] * a.slabs.per[c]
    a.class_first[n_classes] = s
    cut_slabs(a, at, piece_start)
    if n > 0:
        a.n_pieces += 1
    error[0] = 0
    return a


cdef void arena_ref(fc_arena *a) noexcept nogil:
    fc_add64(&a.refs, 1)


cdef void arena_unref(fc_arena *a) noexcept nogil:
    if a == NULL or fc_add64(&a.refs, -1) != 0:
        return
    if a.mapping != NULL:
        munmap(a.mapping, <size_t>a.mapped)
    free(a.addr)
    free(a.cls)
    free(a.piece)
    free(a.leases)
    free(a.parked)
    free(a.told)
    free(a.next_told)
    free(a.piece_base)
    free(a.piece_bytes)
    free(a)


cdef int arena_populate(fc_arena *a, int64_t start, int64_t nbytes) noexcept nogil:
    cdef int64_t at
    cdef int64_t end = min(start + nbytes, a.nbytes)
    if start >= end:
        return 0
    if madvise(a.base + start, <size_t>(end - start), MADV_POPULATE_WRITE) != 0:
        if errno != EINVAL:
            return errno
        at = start                      # a kernel before 5.14
        while at < end:
            fc_touch(a.base + at)
            at += a.page
    fc_add64(&a.populated, end - start)
    return 0


cdef int arena_lock(fc_arena *a, int64_t start, int64_t nbytes) noexcept nogil:
    cdef int64_t end = min(start + nbytes, a.nbytes)
    if start >= end:
        return 0
    if mlock(a.base + start, <size_t>(end - start)) != 0:
        return errno
    fc_add64(&a.locked, end - start)
    return 0


cdef void arena_tell(fc_arena *a, int32_t slot) noexcept nogil:
    cdef int32_t head
    # Stands there already: who takes it clears the mark before it reads the count, which is 0 by now. The look spares a swap.
    if fc_load8(&a.told[slot]) or fc_swap8(&a.told[slot], 1):
        return
    while True:
        head = fc_load32(&a.told_head)
        a.next_told[slot] = head
        if fc_cas32(&a.told_head, head, slot):
            return


cdef int32_t arena_take_told(fc_arena *a) noexcept nogil:
    cdef int32_t head
    while True:
        head = fc_load32(&a.told_head)
        if head < 0 or fc_cas32(&a.told_head, head, -1):
            return head


cdef fc_private *private_new(fc_arena *a, int32_t key, int64_t nbytes, int64_t limit, int *error) noexcept nogil:
    cdef fc_private *p
    cdef int64_t now, peak, size = (nbytes + a.page - 1) // a.page * a.page
    cdef int32_t i
    now = fc_add64(&a.overflow_bytes, size)
    if limit >= 0 and now > limit:
        fc_add64(&a.overflow_bytes, -size)
        error[0] = FC_EOVERFLOW
        return NULL
    error[0] = ENOMEM
    p = <fc_private *>calloc(1, sizeof(fc_private))
    if p != NULL:
        p.data = map_aligned(size, max(a.align, HUGE) if size >= HUGE else a.align, 0, &p.mapping, &p.mapped)
    if p == NULL or p.data == NULL:
        free(p)
        fc_add64(&a.overflow_bytes, -size)
        return NULL
    if size >= HUGE and a.huge != FC_HUGE_OFF:
        madvise(p.data, <size_t>size, MADV_HUGEPAGE)
    while True:
        peak = fc_load64(&a.overflow_peak)
        if now <= peak or fc_cas64(&a.overflow_peak, peak, now):
            break
    p.arena = a
    arena_ref(a)
    p.nbytes = size
    p.refs = 1
    p.holder = -1
    for i in range(FC_HOLDERS):
        if fc_load32(&a.holders[i].key) == -1 and fc_cas32(&a.holders[i].key, -1, key):
            a.holders[i].nbytes = size
            p.holder = i
            break
    error[0] = 0
    return p


cdef void private_ref(fc_private *p) noexcept nogil:
    fc_add32(&p.refs, 1)


cdef void private_unref(fc_private *p) noexcept nogil:
    cdef fc_arena *a
    if fc_add32(&p.refs, -1) != 0:
        return
    a = p.arena
    munmap(p.mapping, <size_t>p.mapped)
    fc_add64(&a.overflow_bytes, -p.nbytes)
    if p.holder >= 0:
        fc_store32(&a.holders[p.holder].key, -1)
    free(p)
    arena_unref(a)


cdef int slabs_read(fc_slabs *k, object plan) except -1:
    cdef int i
    memset(k, 0, sizeof(fc_slabs))
    if plan is None:
        return 0
    nbytes, own, most, per, least = plan
    if not len(own) == len(most) == len(per) == len(least) <= FC_MAX_CLASSES:
        raise ValueError("a plan of slabs needs one entry per size class")
    k.nbytes = nbytes
    for i in range(len(own)):
        k.own[i], k.most[i], k.per[i], k.least[i] = own[i], most[i], per[i], least[i]
        k.n += k.own[i]
    return 0


def huge_bytes(uintptr_t start, int64_t nbytes):
    """Return how many bytes of [start, start + nbytes) of this process lie in huge pages, by /proc/self/smaps."""
    cdef uintptr_t lo, hi
    total = 0
    inside = False
    with open("/proc/self/smaps", "rb") as smaps:
        for line in smaps:
            if b"-" in line[:20] and b":" not in line.split(b" ", 1)[0]:
                low, _, high = line.split(b" ", 1)[0].partition(b"-")
                lo, hi = int(low, 16), int(high, 16)
                inside = lo < start + <uintptr_t>nbytes and hi > start
            elif inside and line.startswith((b"AnonHugePages:", b"Private_Hugetlb:", b"Shared_Hugetlb:")):
                total += int(line.split()[1]) * 1024
    return min(total, nbytes)
