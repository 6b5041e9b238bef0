# One anonymous mapping cut into aligned slots, and the lease counts of those slots. Lives as long as anything refers to it:
# the store, every Hold, every wait. Lock-free throughout, so that a lease may end anywhere (a GC cycle, a signal handler,
# another thread, this thread while it holds the store's mutex).
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t
from fastcache_ext.atomics cimport fc_add32, fc_add64, fc_load32, fc_load8, fc_swap8, fc_store32, fc_cas32

cdef enum:
    FC_MAX_CLASSES = 16     # size classes of slots
    FC_MAX_PER_SLAB = 256   # slots of a class in one slab: what a trade looks at and gives up is bounded
    FC_MAX_PIECES = 16384   # registered buffers (the kernel's limit)
    FC_HOLDERS = 256        # pass-through buffers that can be named at once

cdef enum:
    FC_HUGE_OFF = 0
    FC_HUGE_THP = 1         # transparent: madvise
    FC_HUGE_TLB = 2         # explicit: MAP_HUGETLB

ctypedef struct fc_holder:
    int32_t key             # atomic: -1 free, else the dense key of a live pass-through buffer
    int64_t nbytes

ctypedef struct fc_slabs:       # the part of an arena that size classes trade; zero: none. Arrays by class
    int64_t nbytes          # of a slab
    int32_t n
    int32_t own[16]         # slabs that the class begins with: one after another, class 0's first
    int32_t most[16]        # slabs that it can have, from its first own one on, round and round; 0: it trades none
    int32_t per[16]         # its slots in a slab
    int32_t least[16]       # slots, in slabs or not, below which it gives none up

ctypedef struct fc_arena:
    uint8_t *mapping        # as mmap gave it
    int64_t mapped          # bytes of address space
    uint8_t *base           # first byte of slot 0: 2 MiB aligned, page aligned in arenas below 2 MiB
    int64_t nbytes          # bytes of all slots, padding included
    int64_t page            # bytes per ordinary page
    int64_t align           # bytes: of slots and pass-through buffers; at least a page
    int32_t huge            # FC_HUGE_*: what was asked of the kernel and not refused
    int32_t huge_errno      # errno of a refused madvise or MAP_HUGETLB, else 0
    int32_t fork_gen        # process generation that made it
    int32_t n_slots
    int32_t n_classes
    # Slots of class c: [class_first[c], class_first[c + 1]), those outside slabs first, then those of each slab that it can have. A
    # number has one address for good, whoever has the slab.
    int32_t class_first[17]
    int32_t fixed[16]       # slots of a class outside slabs
    fc_slabs slabs
    int32_t slab_at[16]     # first slab of a class at the start
    int64_t class_bytes[16]         # bytes of a slot of class c
    uint8_t **addr          # [n_slots] first byte
    uint8_t *cls            # [n_slots] size class
    uint16_t *piece         # [n_slots] registration piece
    int32_t n_pieces
    uint8_t **piece_base    # [n_pieces]
    int64_t *piece_bytes    # [n_pieces] at most 1 GiB; a piece ends on a slot edge
    int32_t *leases         # [n_slots] atomic; 0 -> 1 only under the store's mutex
    uint8_t *parked         # [n_slots] atomic: the policy met it leased and wants to hear of the release
    uint8_t *told           # [n_slots] atomic: stands in the stack of released slots
    int32_t *next_told      # [n_slots]
    int32_t told_head       # atomic: push-only, take-all
    int64_t refs            # atomic
    int64_t holds           # Holds alive, and the open store (hold.pxd): together they own one of `refs`
    int64_t populated       # atomic: bytes touched so far
    int64_t locked          # atomic: bytes under mlock
    int64_t overflow_bytes  # atomic: pass-through bytes alive
    int64_t overflow_peak   # atomic
    fc_holder holders[256]

ctypedef struct fc_private:     # a pass-through buffer: one expert outside the arena
    fc_arena *arena         # owned reference
    uint8_t *mapping
    int64_t mapped          # bytes of address space
    uint8_t *data           # 2 MiB aligned when that large, else page aligned
    int64_t nbytes          # bytes charged to overflow_bytes
    int32_t holder          # index into holders, or -1
    int32_t refs            # atomic

cdef int fork_generation() noexcept nogil
cdef const int32_t *fork_word() noexcept nogil          # where that number stands: it changes in a child alone
# `slots[c]` slots of `bytes[c]` bytes each (multiples of the page and of `align`), and `slabs` (or NULL) behind them. NULL with
# *error on failure.
cdef fc_arena *arena_new(const int64_t *bytes, const int32_t *slots, int n_classes, const fc_slabs *slabs, int huge,
                         int64_t align, int *error) noexcept nogil
# `plan`: None, or (bytes of a slab, own, most, per, least), the latter sequences by class.
cdef int slabs_read(fc_slabs *k, object plan) except -1
cdef void arena_ref(fc_arena *a) noexcept nogil
cdef void arena_unref(fc_arena *a) noexcept nogil
# Touch [start, start + nbytes) of the arena without changing it. 0 or a positive errno.
cdef int arena_populate(fc_arena *a, int64_t start, int64_t nbytes) noexcept nogil
cdef int arena_lock(fc_arena *a, int64_t start, int64_t nbytes) noexcept nogil
# Take the whole stack of released slots: its head, or -1; follow next_told.
cdef int32_t arena_take_told(fc_arena *a) noexcept nogil
cdef void arena_tell(fc_arena *a, int32_t slot) noexcept nogil
# NULL with *error = ENOMEM (or FC_EOVERFLOW: `limit` would be passed).
cdef fc_private *private_new(fc_arena *a, int32_t key, int64_t nbytes, int64_t limit, int *error) noexcept nogil
cdef void private_ref(fc_private *p) noexcept nogil
cdef void private_unref(fc_private *p) noexcept nogil

cdef enum:
    FC_EOVERFLOW = 1006

# The slab of a slot, or -1: it is in none.
cdef inline int32_t slab_of(const fc_arena *a, int32_t slot) noexcept nogil:
    cdef int c = a.cls[slot]
    cdef int32_t i = slot - a.class_first[c] - a.fixed[c]
    return (a.slab_at[c] + i // a.slabs.per[c]) % a.slabs.n if i >= 0 else -1

# The first of a class's slots in a slab, or -1: it cannot have that one.
cdef inline int32_t slab_first(const fc_arena *a, int c, int32_t slab) noexcept nogil:
    cdef int32_t i = slab - a.slab_at[c]
    if i < 0:
        i += a.slabs.n
    return a.class_first[c] + a.fixed[c] + i * a.slabs.per[c] if i < a.slabs.most[c] else -1

cdef inline int32_t lease_take(fc_arena *a, int32_t slot) noexcept nogil:
    return fc_add32(&a.leases[slot], 1)             # leases on it now

cdef inline void lease_drop(fc_arena *a, int32_t slot) noexcept nogil:
    # Dekker with the policy's park(): either it sees 0, or we see parked.
    if fc_add32(&a.leases[slot], -1) == 0 and fc_load8(&a.parked[slot]):
        arena_tell(a, slot)
