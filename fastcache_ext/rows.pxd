# Rows of moving averages, four experts to a cache line, and searches without a branch per expert or layer: on any CPU.
# A block is FC_ROW floats: each of the FC_AVERAGES averages of four experts. An expert whose first average has its sign bit set
# cannot go: no search finds it, and fc_chance() adds FC_BARRED to its chance.
from libc.stdint cimport int32_t

cdef enum:
    FC_ROW = 16
    FC_AVERAGES = 4
    FC_BLOCKS = 2           # a row is a multiple of so many blocks
    FC_BARRED = 8           # above every chance

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    typedef float fc_v4 __attribute__((vector_size(16), may_alias));
    typedef int32_t fc_i4 __attribute__((vector_size(16)));
    typedef float fc_u4 __attribute__((vector_size(16), may_alias, aligned(4)));
    static inline fc_v4 fc_lesser(fc_v4 a, fc_v4 b) {       /* b where a is not a number */
    #if defined(__SSE__)
        return __builtin_ia32_minps(a, b);
    #else
        fc_i4 less = a < b;
        return (fc_v4)(((fc_i4)a & less) | ((fc_i4)b & ~less));
    #endif
    }
    static inline int fc_any(fc_i4 mask) {
    #if defined(__SSE__)
        return __builtin_ia32_movmskps((fc_v4)mask);
    #else
        typedef int64_t fc_l2 __attribute__((vector_size(16)));
        return (((fc_l2)mask)[0] | ((fc_l2)mask)[1]) != 0;
    #endif
    }
    /* Of an expert that cannot go not a number: neither less nor more than any, nor equal to one. */
    static inline fc_v4 fc_chances(const float *block, const fc_v4 *m) {
        const fc_v4 *x = (const fc_v4 *)block;
        const fc_v4 c = m[0] * x[0] + m[1] * x[1] + m[2] * x[2] + m[3] * x[3];
        return (fc_v4)((fc_i4)c | ((fc_i4)x[0] >> 31));
    }
    static inline float fc_chance(const float *x, const float *m) {     /* of one expert, summed alike */
        return m[0] * __builtin_fabsf(x[0]) + m[1] * x[4] + m[2] * x[8] + m[3] * x[12] + (__builtin_signbit(x[0]) ? 8.0f : 0.0f);
    }
    static inline void fc_bar(float *x, int barred) {
        x[0] = __builtin_copysignf(x[0], barred ? -1.0f : 1.0f);
    }
    /* The weights move towards the averages that had expected the expert at `x`. What no blend would have kept, as it was expected
       far less than those that go (`usual`), teaches little. Least weight: what is no use now may be some day. */
    static inline void fc_learn(float *weight, const float *expected, const float *x, float step, float usual) {
        fc_v4 w = *(fc_u4 *)weight, part = w * *(const fc_u4 *)expected * (fc_v4){__builtin_fabsf(x[0]), x[4], x[8], x[12]};
        const fc_v4 floor = {1e-3f, 1e-3f, 1e-3f, 1e-3f};
        float total = (part[0] + part[1]) + (part[2] + part[3]), share, keep;
        fc_i4 low;
        if (total < 1e-12f)
            return;
        share = step / __builtin_sqrtf(total * (total + usual));
        keep = 1.0f - share * total;
        w = w * (fc_v4){keep, keep, keep, keep} + part * (fc_v4){share, share, share, share};
        low = w < floor;
        *(fc_u4 *)weight = (fc_v4)(((fc_i4)floor & low) | ((fc_i4)w & ~low));
    }
    static inline void fc_picked(float *x, const float *adds) {
        x[0] += __builtin_copysignf(adds[0], x[0]);
        x[4] += adds[1];
        x[8] += adds[2];
        x[12] += adds[3];
    }
    static inline fc_v4 fc_over(fc_v4 c, fc_v4 above, fc_v4 barred) {
        fc_i4 over = c > above;
        return (fc_v4)(((fc_i4)c & over) | ((fc_i4)barred & ~over));
    }
    /* The least chance of a row that is over `above` and under `barred`, in *least; the places where it stands, in `at`, in order:
       how many. Minima of groups of blocks are kept, so that only groups that hold it are read twice. */
    static int32_t fc_row_least(const float *row, int32_t blocks, const float *mult, float above, float barred,
                                float *least, int32_t *at) {
        enum { GROUPS = 64 };
        fc_v4 group[GROUPS], best, bar4 = {barred, barred, barred, barred}, above4 = {above, above, above, above};
        fc_v4 m[4] = {{mult[0], mult[0], mult[0], mult[0]}, {mult[1], mult[1], mult[1], mult[1]},
                      {mult[2], mult[2], mult[2], mult[2]}, {mult[3], mult[3], mult[3], mult[3]}};
        int32_t size = (blocks + GROUPS - 1) / GROUPS, b = 0, g, n = 0, lane, end;
        size = size < 8 ? 8 : size + (size & 1);
        best = bar4;
        for (g = 0; b < blocks; g++) {
            fc_v4 one = bar4, two = bar4;
            end = b + size < blocks ? b + size : blocks;
            if (above < 0)
                for (; b < end; b += 2) {
                    one = fc_lesser(fc_chances(row + 16 * b, m), one);
                    two = fc_lesser(fc_chances(row + 16 * b + 16, m), two);
                }
            else
                for (; b < end; b++)
                    one = fc_lesser(fc_over(fc_chances(row + 16 * b, m), above4, bar4), one);
            group[g] = fc_lesser(one, two);
            best = fc_lesser(group[g], best);
        }
        *least = best[0];
        for (lane = 1; lane < 4; lane++)
            if (best[lane] < *least)
                *least = best[lane];
        if (*least >= barred)
            return 0;
        best = (fc_v4){*least, *least, *least, *least};
        for (end = g, g = 0; g < end; g++) {
            if (!fc_any(group[g] == best))
                continue;
            for (b = g * size; b < (g + 1) * size && b < blocks; b++) {
                fc_i4 here = fc_chances(row + 16 * b, m) == best;
                if (!fc_any(here))
                    continue;
                for (lane = 0; lane < 4; lane++)
                    if (here[lane])
                        at[n++] = 4 * b + lane;
            }
        }
        return n;
    }
    /* The greatest of n >= 0 numbers; -inf for none. Two at a time, and no branch per number. */
    static inline double fc_greatest(const double *x, int32_t n) {
        typedef double fc_d2 __attribute__((vector_size(16), may_alias, aligned(8)));
        typedef int64_t fc_l2 __attribute__((vector_size(16)));
        double most = -__builtin_inf();
        fc_d2 one = {most, most}, two = one, a, b;
        fc_l2 more;
        int32_t i = 0;
        for (; i + 4 <= n; i += 4) {
            a = *(const fc_d2 *)(x + i);
            b = *(const fc_d2 *)(x + i + 2);
            more = a > one;
            one = (fc_d2)(((fc_l2)a & more) | ((fc_l2)one & ~more));
            more = b > two;
            two = (fc_d2)(((fc_l2)b & more) | ((fc_l2)two & ~more));
        }
        for (; i < n; i++)
            most = x[i] > most ? x[i] : most;
        most = one[0] > most ? one[0] : most;
        most = one[1] > most ? one[1] : most;
        most = two[0] > most ? two[0] : most;
        return two[1] > most ? two[1] : most;
    }
    /* Take a row down: each average times its own factor. Signs stay, also those of zeros. */
    static void fc_row_scale(float *row, int32_t blocks, const float *factor) {
        const fc_v4 least = {1e-30f, 1e-30f, 1e-30f, 1e-30f};       /* no denormals */
        const fc_i4 sign = {INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN};
        int32_t b, i;
        for (b = 0; b < blocks; b++)
            for (i = 0; i < 4; i++) {
                fc_v4 *x = (fc_v4 *)(row + 16 * b + 4 * i);
                fc_i4 bits = (fc_i4)(*x * (fc_v4){factor[i], factor[i], factor[i], factor[i]});
                *x = (fc_v4)((bits & sign) | (bits & ~sign & ((fc_v4)(bits & ~sign) > least)));
            }
    }
    """
    float fc_chance(const float *x, const float *m) noexcept nogil
    void fc_bar(float *x, bint barred) noexcept nogil
    void fc_learn(float *weight, const float *expected, const float *x, float step, float usual) noexcept nogil
    void fc_picked(float *x, const float *adds) noexcept nogil
    int32_t fc_row_least(const float *row, int32_t blocks, const float *mult, float above, float barred,
                         float *least, int32_t *at) noexcept nogil
    double fc_greatest(const double *x, int32_t n) noexcept nogil
    void fc_row_scale(float *row, int32_t blocks, const float *factor) noexcept nogil
