# Checksums of experts: what is wanted, or what came.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t

ctypedef struct fc_sums:
    int32_t width           # tensors of an expert, at most
    int64_t *place          # [n_keys, width] bytes from the slot's start to each tensor, in layout order
    int64_t *nbytes         # [n_records, width] bytes of each; 0: the record has no such tensor
    uint16_t *record_of     # [n_keys]
    uint32_t *sums          # [n_keys]
    int32_t keep            # 1: write down what came; 0: hold it to `sums`

# Copies the columns; NULL without memory. `sums` may be NULL: then keep.
cdef fc_sums *sums_new(int64_t n_keys, int32_t width, int64_t n_records, const int64_t *place, const int64_t *nbytes,
                       const uint16_t *record_of, const uint32_t *sums) noexcept nogil
cdef void sums_free(fc_sums *s) noexcept nogil
# All bytes of `key` are at `data`, each tensor in its place. False: they are not those that were checksummed. No lock: a key is
# read once at a time.
cdef bint sums_agree(fc_sums *s, int32_t key, const uint8_t *data, uint32_t *wanted, uint32_t *got) noexcept nogil
