// Whole-number sums of up to 6 rows by 4 panels of 16 outputs, in registers: 24 sums, 4 vectors of weights, 1 of a row.
//
// In assembly, because GCC 12 keeps most of these sums on the stack and stores each after every addition, which takes
// twice the time.
#pragma once

#include <cstdint>
#include <immintrin.h>

#if defined(__AVX512VNNI__)

// One row's four inputs, by the weights in registers 0 to 3, added to the sums in registers a to d.
#define PENSTOCK_ROW(address, a, b, c, d)   \
    "vpbroadcastd " address ", %%zmm4\n\t"  \
    "vpdpbusd %%zmm0, %%zmm4, %%zmm" #a "\n\t" \
    "vpdpbusd %%zmm1, %%zmm4, %%zmm" #b "\n\t" \
    "vpdpbusd %%zmm2, %%zmm4, %%zmm" #c "\n\t" \
    "vpdpbusd %%zmm3, %%zmm4, %%zmm" #d "\n\t"
#define PENSTOCK_ROWS_2 \
    PENSTOCK_ROW("(%[rows])", 8, 9, 10, 11) PENSTOCK_ROW("(%[rows],%[stride])", 12, 13, 14, 15)
#define PENSTOCK_ROWS_3 PENSTOCK_ROWS_2 PENSTOCK_ROW("(%[rows],%[stride],2)", 16, 17, 18, 19)
#define PENSTOCK_ROWS_4 PENSTOCK_ROWS_3 PENSTOCK_ROW("(%[fourth])", 20, 21, 22, 23)
#define PENSTOCK_ROWS_5 PENSTOCK_ROWS_4 PENSTOCK_ROW("(%[fourth],%[stride])", 24, 25, 26, 27)
#define PENSTOCK_ROWS_6 PENSTOCK_ROWS_5 PENSTOCK_ROW("(%[fourth],%[stride],2)", 28, 29, 30, 31)

#define PENSTOCK_EACH_SUM(DO)                                                                                  \
    DO(8) DO(9) DO(10) DO(11) DO(12) DO(13) DO(14) DO(15) DO(16) DO(17) DO(18) DO(19) DO(20) DO(21) DO(22) DO(23) \
    DO(24) DO(25) DO(26) DO(27) DO(28) DO(29) DO(30) DO(31)
#define PENSTOCK_ZERO(n) "vpxord %%zmm" #n ", %%zmm" #n ", %%zmm" #n "\n\t"
#define PENSTOCK_KEEP(n) "vmovdqa64 %%zmm" #n ", 64*(" #n "-8)(%[sums])\n\t"
#define PENSTOCK_LOST(n) "zmm" #n,

#define PENSTOCK_SUM(ROWS)                                                                                         \
    asm volatile(PENSTOCK_EACH_SUM(PENSTOCK_ZERO) ".p2align 4\n"                                                   \
                 "1:\n\t"                                                                                          \
                 "vmovdqu64 (%[weights]), %%zmm0\n\t"                                                              \
                 "vmovdqu64 (%[weights],%[apart]), %%zmm1\n\t"                                                     \
                 "vmovdqu64 (%[weights],%[apart],2), %%zmm2\n\t"                                                   \
                 "vmovdqu64 (%[weights],%[three_apart]), %%zmm3\n\t" ROWS "add $64, %[weights]\n\t"                \
                 "add $4, %[rows]\n\t"                                                                             \
                 "add $4, %[fourth]\n\t"                                                                           \
                 "dec %[quads]\n\t"                                                                                \
                 "jnz 1b\n\t" PENSTOCK_EACH_SUM(PENSTOCK_KEEP)                                                     \
                 : [weights] "+&r"(weights), [rows] "+&r"(rows), [fourth] "+&r"(fourth), [quads] "+&r"(quads)      \
                 : [apart] "r"(apart), [three_apart] "r"(3 * apart), [stride] "r"(stride), [sums] "r"(sums)        \
                 : PENSTOCK_EACH_SUM(PENSTOCK_LOST) "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "cc", "memory")

constexpr int MOST_ROWS = 6, FOUR_PANELS = 4;

// sums [MOST_ROWS][FOUR_PANELS], aligned; those of the first ROWS rows are told. Panels lie `apart` bytes from each other,
// rows `stride`. quads: a fourth of the inputs, at least 1.
template <int ROWS>
inline void sum_four_panels(const uint8_t* rows, int64_t stride, const int8_t* weights, int64_t apart, int64_t quads,
                            __m512i* sums) {
    static_assert(ROWS >= 2 && ROWS <= MOST_ROWS);
    const uint8_t* fourth = rows + 3 * stride;
    if constexpr (ROWS == 2) PENSTOCK_SUM(PENSTOCK_ROWS_2);
    if constexpr (ROWS == 3) PENSTOCK_SUM(PENSTOCK_ROWS_3);
    if constexpr (ROWS == 4) PENSTOCK_SUM(PENSTOCK_ROWS_4);
    if constexpr (ROWS == 5) PENSTOCK_SUM(PENSTOCK_ROWS_5);
    if constexpr (ROWS == 6) PENSTOCK_SUM(PENSTOCK_ROWS_6);
}

#endif
