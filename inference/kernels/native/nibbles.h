// 4-bit weights on their way into a product: a panel's tiles expanded to the int8 levels of quant/rotated.py.
//
// level = (q * step >> 4) + offset, in whole numbers, so that a weight is the same bits wherever it is expanded. Within a
// panel of 16 outputs a tile of 64 inputs is 512 bytes: for each two quads of inputs 32 words of four nibbles each,
// [quad][half] from the lowest, where a word's place is that of two neighbouring int8 levels in the expanded quad: half 0
// holds, in each lane of 128 bits, its first two outputs, half 1 its last two, as packus lays them together.
// Factors are, for each group of inputs, 16 steps and 16 offsets, one an output.

#pragma once

#include "vectors.h"

#if defined(__AVX512VNNI__)

namespace {

// Asked for so far ahead: the processor's own prefetching stops at the end of each 4 KiB.
constexpr int64_t NIBBLES_AHEAD = 4096;
constexpr int64_t NIBBLE_TILE_BYTES = 512, FACTOR_BYTES = 32, QUADS_A_HALF = 8;

// One group's steps and offsets of 16 outputs, spread to the places of their weights.
struct Factors {
    __m512i first_steps, last_steps, offsets;

    explicit Factors(const uint8_t* factors) {
        const __m512i steps = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)factors));
        const __m512i lows = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(factors + 16)));
        // -1 gives 0: a step fills the lower byte of a word.
        const __m512i first = _mm512_broadcast_i32x4(_mm_setr_epi8(0, -1, 0, -1, 0, -1, 0, -1, 4, -1, 4, -1, 4, -1, 4, -1));
        const __m512i last = _mm512_broadcast_i32x4(_mm_setr_epi8(8, -1, 8, -1, 8, -1, 8, -1, 12, -1, 12, -1, 12, -1, 12, -1));
        const __m512i four = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
        first_steps = _mm512_shuffle_epi8(steps, first);
        last_steps = _mm512_shuffle_epi8(steps, last);
        offsets = _mm512_shuffle_epi8(lows, four);
    }
};

// 64 bytes of nibbles -> two quads of int8 levels.
inline void expand_pair(const uint8_t* nibbles, const Factors& factors, __m512i* quads) {
    const __m512i words = _mm512_loadu_si512(nibbles), high = _mm512_set1_epi16((short)0xF000);
    // q << 12 times the step, the upper 16 of 32 bits: q * step >> 4.
    const __m512i a = _mm512_mulhi_epu16(_mm512_slli_epi16(words, 12), factors.first_steps);
    const __m512i b = _mm512_mulhi_epu16(_mm512_and_si512(_mm512_slli_epi16(words, 8), high), factors.last_steps);
    const __m512i c = _mm512_mulhi_epu16(_mm512_and_si512(_mm512_slli_epi16(words, 4), high), factors.first_steps);
    const __m512i d = _mm512_mulhi_epu16(_mm512_and_si512(words, high), factors.last_steps);
    quads[0] = _mm512_add_epi8(_mm512_packus_epi16(a, b), factors.offsets);
    quads[1] = _mm512_add_epi8(_mm512_packus_epi16(c, d), factors.offsets);
}

// A panel's 4-bit weights: `group` inputs, a multiple of 32, share a factor.
struct NibblePanel {
    const uint8_t* nibbles;
    const uint8_t* factors;
    int64_t group;

    const uint8_t* factors_of(int64_t half) const { return factors + half * 32 / group * FACTOR_BYTES; }
};

// `count` tiles of a panel from `first` on -> int8 tiles as matmul.cpp takes them.
inline void expand_tiles(const NibblePanel& panel, int64_t first, int64_t count, int8_t* tiles) {
    for (int64_t half = 2 * first; half < 2 * (first + count); half++) {
        const Factors factors(panel.factors_of(half));
        const uint8_t* nibbles = panel.nibbles + half * NIBBLE_TILE_BYTES / 2;
        for (int64_t pair = 0; pair < QUADS_A_HALF / 2; pair++, tiles += 128) {
            __m512i two[2];
            _mm_prefetch((const char*)nibbles + pair * 64 + NIBBLES_AHEAD, _MM_HINT_T0);
            expand_pair(nibbles + pair * 64, factors, two);
            _mm512_storeu_si512(tiles, two[0]);
            _mm512_storeu_si512(tiles + 64, two[1]);
        }
    }
}

// Where the nibble of input k (within its tile) and output n (within its panel) lies: a byte of the tile, and a shift.
struct NibblePlace {
    int64_t byte;
    int shift;

    NibblePlace(int64_t k, int64_t n) {
        const int64_t quad = k / 4, lane = n / 4, half = n % 4 / 2, word = lane * 8 + n % 2 * 4 + k % 4;
        const int nibble = (int)(quad % 2 * 2 + half);
        byte = quad / 2 * 64 + word * 2 + nibble / 2;
        shift = nibble % 2 * 4;
    }
};

}  // namespace

#endif
