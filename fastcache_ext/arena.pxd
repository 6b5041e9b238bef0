# One anonymous mapping cut into aligned slots, and the lease counts of those slots. Lives as long as anything refers to it:
# the store, every Hold, every wait. Lock-free throughout, so that a lease may end anywhere (a GC cycle, a signal handler,
# another thread, this thread while it holds the store's mutex).
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t
from fastcache_ext.atomics cimport fc_add32, fc_add64, fc_load32, fc_load8, fc_swap8, fc_store32, fc_cas32

cdef enum:
    FC_MAX_CLASSES = 16     # size classes of slots
    FC_MAX_PIECES = 16384   # registered buffers (the kernel's limit)
    FC_HOLDERS = 256        # pass-through buffers that can be named at once

cdef enum:
    FC_HUGE_OFF = 0
    FC_HUGE_THP = 1         # transparent: madvise
    FC_HUGE_TLB = 2         # explicit: MAP_HUGETLB

ctypedef struct fc_holder:
    int32_t key             # atomic: -1 free, else the dense key of a live pass-through buffer
    int64_t nbytes

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
    int32_t class_first[17]         # slots of class c: [class_first[c], class_first[c + 1])
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
# `slots[c]` slots of `bytes[c]` bytes each (multiples of the page and of `align`). NULL with *error on failure.
cdef fc_arena *arena_new(const int64_t *bytes, const int32_t *slots, int n_classes, int huge, int64_t align,
                         int *error) noexcept nogil
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

cdef inline int32_t lease_take(fc_arena *a, int32_t slot) noexcept nogil:
    return fc_add32(&a.leases[slot], 1)             # leases on it now

cdef inline void lease_drop(fc_arena *a, int32_t slot) noexcept nogil:
    # Dekker with the policy's park(): either it sees 0, or we see parked.
    if fc_add32(&a.leases[slot], -1) == 0 and fc_load8(&a.parked[slot]):
        arena_tell(a, slot)
