# CRC-32C (Castagnoli), as iSCSI, ext4 and Btrfs use it.
from libc.stdint cimport int64_t, uint8_t, uint32_t

# The checksum of n more bytes after those whose checksum is `crc` (0: none yet).
cdef uint32_t crc32c_more(uint32_t crc, const uint8_t *data, int64_t n) noexcept nogil
