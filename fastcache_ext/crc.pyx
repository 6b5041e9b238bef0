"""CRC-32C: one function for what is written and for what is checked, in native threads and in Python.

Where the processor has an instruction for it, three streams of it run side by side, because each waits three cycles for its own
last step; elsewhere eight tables take eight bytes a step. The path is chosen once, when the module is imported.
The polynomial, its bit order and the inversions: RFC 3720, section 12.1. Knows nothing of fastcache. May import libc.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t, uint32_t

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    enum { FC_LONG = 8192, FC_SHORT = 256 };           /* bytes of one of three streams; multiples of 8 */
    static uint32_t fc_slice[8][256];                  /* [i][b]: the byte b, with i bytes of zeros after it */
    static uint32_t fc_past_long[4][256];              /* [i][b]: byte i of a checksum, FC_LONG bytes of zeros later */
    static uint32_t fc_past_short[4][256];

    static void fc_past_init(uint32_t table[4][256], int zeros) {
        for (int bit = 0; bit < 32; bit++) {           /* it is linear: 32 bits make every value */
            uint32_t crc = 1u << bit;
            for (int i = 0; i < zeros; i++) crc = fc_slice[0][crc & 255] ^ (crc >> 8);
            uint32_t *row = table[bit / 8];
            for (int b = 0; b < 256; b++) if (b >> (bit % 8) & 1) row[b] ^= crc;
        }
    }

    static inline uint32_t fc_past(uint32_t table[4][256], uint32_t crc) {
        return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255] ^ table[3][crc >> 24];
    }

    static void fc_crc_init(void) {
        for (int b = 0; b < 256; b++) {
            uint32_t crc = (uint32_t)b;
            for (int k = 0; k < 8; k++) crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
            fc_slice[0][b] = crc;
        }
        for (int b = 0; b < 256; b++)
            for (int i = 1; i < 8; i++)
                fc_slice[i][b] = fc_slice[0][fc_slice[i - 1][b] & 255] ^ (fc_slice[i - 1][b] >> 8);
        fc_past_init(fc_past_long, FC_LONG);
        fc_past_init(fc_past_short, FC_SHORT);
    }

    static uint32_t fc_crc_table(uint32_t crc, const uint8_t *p, int64_t n) {
        for (; n >= 8; n -= 8, p += 8) {
            uint32_t a = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
            crc = fc_slice[7][a & 255] ^ fc_slice[6][a >> 8 & 255] ^ fc_slice[5][a >> 16 & 255] ^ fc_slice[4][a >> 24]
                ^ fc_slice[3][p[4]] ^ fc_slice[2][p[5]] ^ fc_slice[1][p[6]] ^ fc_slice[0][p[7]];
        }
        for (; n > 0; n--, p++) crc = fc_slice[0][(crc ^ *p) & 255] ^ (crc >> 8);
        return crc;
    }

    #if defined(__x86_64__)
    #define FC_CRC_TARGET __attribute__((target("sse4.2")))
    #define FC_CRC_8(crc, word) ((uint32_t)__builtin_ia32_crc32di(crc, word))
    #define FC_CRC_1(crc, byte) __builtin_ia32_crc32qi(crc, byte)
    #define FC_CRC_NAME "sse4.2"
    static int fc_crc_has(void) { __builtin_cpu_init(); return __builtin_cpu_supports("sse4.2") != 0; }
    #elif defined(__aarch64__) && defined(__linux__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    #include <sys/auxv.h>
    #define FC_CRC_TARGET
    #define FC_CRC_NAME "armv8-crc"
    static inline uint32_t FC_CRC_8(uint32_t crc, uint64_t word) {
        __asm__(".arch_extension crc\\n\\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word)); return crc; }
    static inline uint32_t FC_CRC_1(uint32_t crc, uint8_t byte) {
        __asm__(".arch_extension crc\\n\\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(byte)); return crc; }
    static int fc_crc_has(void) { return (getauxval(AT_HWCAP) >> 7 & 1) != 0; }      /* HWCAP_CRC32 */
    #endif

    #ifdef FC_CRC_NAME
    static inline uint64_t fc_word(const uint8_t *p) { uint64_t w; memcpy(&w, p, 8); return w; }

    FC_CRC_TARGET static uint32_t fc_crc_streams(uint32_t crc, const uint8_t **at, int64_t *left, int len,
                                                 uint32_t past[4][256]) {
        const uint8_t *p = *at;
        int64_t n = *left;
        for (; n >= 3 * (int64_t)len; n -= 3 * (int64_t)len, p += 3 * (int64_t)len) {
            uint32_t second = 0, third = 0;
            for (int i = 0; i < len; i += 8) {
                crc = FC_CRC_8(crc, fc_word(p + i));
                second = FC_CRC_8(second, fc_word(p + len + i));
                third = FC_CRC_8(third, fc_word(p + 2 * len + i));
            }
            crc = fc_past(past, fc_past(past, crc) ^ second) ^ third;
        }
        *at = p;
        *left = n;
        return crc;
    }

    FC_CRC_TARGET static uint32_t fc_crc_instruction(uint32_t crc, const uint8_t *p, int64_t n) {
        crc = fc_crc_streams(crc, &p, &n, FC_LONG, fc_past_long);
        crc = fc_crc_streams(crc, &p, &n, FC_SHORT, fc_past_short);
        for (; n >= 8; n -= 8, p += 8) crc = FC_CRC_8(crc, fc_word(p));
        for (; n > 0; n--, p++) crc = FC_CRC_1(crc, *p);
        return crc;
    }
    #else
    #define FC_CRC_NAME "table"
    #define fc_crc_instruction fc_crc_table
    static int fc_crc_has(void) { return 0; }
    #endif
    """
    const char *FC_CRC_NAME
    void fc_crc_init() noexcept nogil
    bint fc_crc_has() noexcept nogil
    uint32_t fc_crc_table(uint32_t crc, const uint8_t *p, int64_t n) noexcept nogil
    uint32_t fc_crc_instruction(uint32_t crc, const uint8_t *p, int64_t n) noexcept nogil

fc_crc_init()
cdef bint instruction = fc_crc_has()
HOW = FC_CRC_NAME.decode() if instruction else "table"


cdef uint32_t crc32c_more(uint32_t crc, const uint8_t *data, int64_t n) noexcept nogil:
    if instruction:
        return ~fc_crc_instruction(~crc, data, n)
    return ~fc_crc_table(~crc, data, n)


cdef uint32_t of_buffer(object data, uint32_t value, bint by_table) except? 0:
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    with nogil:
        if by_table:
            value = ~fc_crc_table(~value, <const uint8_t *>view.buf, view.len)
        else:
            value = crc32c_more(value, <const uint8_t *>view.buf, view.len)
    PyBuffer_Release(&view)
    return value


def crc32c(data, uint32_t value=0):
    """Return the CRC-32C of `data`, a C-contiguous buffer, after bytes whose CRC-32C is `value`. Lets the GIL go."""
    return of_buffer(data, value, False)


def crc32c_by_table(data, uint32_t value=0):
    """The same without the processor's instruction: what a processor that lacks it does."""
    return of_buffer(data, value, True)
