"""The checker: what stands in for the recorder while a recording is replayed.

What the store decided must be what the records say; what it could not decide is answered from them. May import libc, monitor's
structs, recorder and table.
"""
from libc.stdint cimport int32_t, uint64_t

from fastcache_ext.recorder cimport (
    FC_AS_DECLINED, T_LEASED, T_RELEASED, T_REQUEST, T_SERVED, T_SINGLE, fc_recorder, record,
)
from fastcache_ext.table cimport FC_INFLIGHT

cdef uint64_t AUX = <uint64_t>0xFFFF << 16


cdef void diverge(fc_replay *s, uint64_t instead) noexcept nogil:
    if s.stop < 0:
        s.stop = DIVERGED if s.at < s.n else CUT
        s.instead = instead


cdef uint64_t compare(fc_recorder *r, uint64_t rec) noexcept nogil:
    """In place of the recorder's slow(). Whether a hit was on what somebody held already is for the records to say."""
    cdef fc_replay *s = <fc_replay *>r
    cdef int kind = rec & 255
    cdef uint64_t differ = ~<uint64_t>0
    if s.stop >= 0:
        return rec
    if kind == T_REQUEST or kind == T_SERVED or kind == T_SINGLE:
        differ ^= AUX
    if s.at >= s.n or (s.records[s.at] ^ rec) & differ:
        diverge(s, rec)
        return rec
    s.at += 1
    return s.records[s.at - 1]


cdef bint leased(void *ctx, int32_t slot, bint answer) noexcept nogil:
    cdef fc_replay *s = <fc_replay *>ctx
    cdef uint64_t asked = record(T_LEASED, 0, 0, slot)
    if s.stop < 0 and s.at < s.n and (s.records[s.at] | 1 << 8) == (asked | 1 << 8):
        answer = (s.records[s.at] >> 8) & 1
        if answer or s.c.table.slots[slot].state != FC_INFLIGHT:
            s.at += 1
            return answer
    diverge(s, asked)
    return s.c.table.slots[slot].state == FC_INFLIGHT


cdef int32_t told(void *ctx) noexcept nogil:
    cdef fc_replay *s = <fc_replay *>ctx
    cdef int32_t slot
    if s.stop >= 0 or s.at >= s.n or (s.records[s.at] & 255) != T_RELEASED:
        return -1
    slot = <int32_t>(s.records[s.at] >> 32)
    if slot < 0 or slot >= s.c.table.n_slots:
        s.stop = STRANGE
        return -1
    s.at += 1
    return slot


cdef bint admitted(fc_recorder *r) noexcept nogil:
    cdef fc_replay *s = <fc_replay *>r
    return s.at >= s.n or (s.records[s.at] & 0xFFFF) != (T_REQUEST | FC_AS_DECLINED << 8)


cdef void checker_init(fc_replay *s) noexcept nogil:
    s.hooks.slow = compare
    s.hooks.admitted = admitted
    s.hooks.witness.ctx = s
    s.hooks.witness.leased = leased
    s.hooks.witness.told = told
