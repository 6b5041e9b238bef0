# The files of one store: descriptors, sizes, alignment, fingerprints, and whether direct reads really work.
from libc.stdint cimport int32_t, int64_t, uint8_t
from fastcache_ext.ioqueue cimport fc_file

# 0, or a positive errno. *changed = 1 when size, mtime, device or inode differ from those at open. One fstat; no lock.
# A memory file never changes.
cdef int file_check(const fc_file *file, int *changed) noexcept nogil

cdef class FileSet:
    cdef fc_file *files             # [n_files]; descriptors are closed by close() or __dealloc__
    cdef int32_t n_files
    cdef readonly list paths        # str or None (memory), by index
    cdef readonly list reasons      # str, by index: why a file was not opened for direct reads; "" where it was
    cdef list keep                  # memoryviews that hold the memory files' buffers
