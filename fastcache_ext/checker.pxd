# The recorder's hooks, pointed at a recording that is replayed: they compare what they would have written.
from libc.stdint cimport int32_t, int64_t, uint64_t

from fastcache_ext.monitor cimport fc_core, fc_node, fc_wait
from fastcache_ext.recorder cimport fc_recorder

cdef enum:                  # why run() stopped
    ENDED = 0               # at the records that say so
    CUT = 1                 # the file ends without saying so, or inside a batch
    LOST = 2                # records were lost here
    DIVERGED = 3
    STRANGE = 4             # a record that cannot be here
    MAX_KINDS = 64          # of policies

ctypedef struct fc_call:        # a recorded call: its wait, and its nodes behind it
    fc_wait w
    fc_call *next
    fc_node *nodes

ctypedef struct fc_replay:
    fc_recorder hooks       # first: the hooks are given this
    fc_core *c
    const uint64_t *records
    int64_t n
    int64_t at              # the next record
    int64_t op              # the one that began what goes on now
    int stop                # -1: not yet
    uint64_t instead        # where it diverged: what the replay would have written
    fc_call *calls          # that somebody may still wait in
    int32_t n_calls
    int32_t sweep_at
    int kinds[MAX_KINDS]    # policies, by their numbers in the file; -1: none

cdef void checker_init(fc_replay *s) noexcept nogil
# The replay has left the recording: it would have written `instead`, or (0) nothing could be done for the next record.
cdef void diverge(fc_replay *s, uint64_t instead) noexcept nogil
