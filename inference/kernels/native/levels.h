// Attention over 8-bit and 4-bit pages: both products are sums of integers. Keys against rotated 8-bit queries, and
// weights of 8 bits a page against values (cf. arXiv 2410.02367).
//
// A row may go alone with the others of its token, by dot products, or in a block of several tokens that read the same
// pages, by AMX tiles; and change from the one to the other at any page. Its bits are the same either way: sums of
// integers have no rounding, and every operation of floats is said outright here, because the compiler might else fuse a
// product and a sum in the one and not in the other.

#pragma once

#include "softmax.h"
#include "tiles.h"

#if defined(__AVX512VNNI__)

namespace {

// v, which the compiler may not fuse with what takes it.
inline floats rounded(floats v) {
    asm("" : "+v"(v));
    return v;
}
inline floats scores_of(const __m512i sums, const QueryHead& query, int zero, floats key_scales) {
    const __m512i levels = _mm512_sub_epi32(sums, _mm512_set1_epi32(zero * query.level_sum));
    return rounded((floats)_mm512_cvtepi32_ps(levels) * (key_scales * query.scale));
}
// Values' scales go into the weights; where a weight is 0 the scale may be anything, NaN too.
inline floats with_value_scales(floats weights, floats scales) {
    const __m512 w = (__m512)weights;
    return (floats)_mm512_mask_mul_ps(w, _mm512_cmp_ps_mask(w, _mm512_setzero_ps(), _CMP_GT_OQ), w, (__m512)scales);
}
inline void store_bytes(uint8_t* to, floats weights, float inverse) {
    const __m512i levels = _mm512_cvtps_epi32((__m512)(weights * inverse));
    _mm_store_si128((__m128i*)to, _mm512_cvtusepi32_epi8(levels));
}
// A page's sums of weights and values, of which one weight is `step`, into the row's.
inline void add_page(float* to, __m512i added, float step, floats fade) {
    const __m512 faded = (__m512)rounded(load(to) * fade);
    store(to, (floats)_mm512_fmadd_ps(_mm512_cvtepi32_ps(added), _mm512_set1_ps(step), faded));
}

// One head of a page; 4 bits are laid out as 8 would lie.
template <int BITS>
struct Levels {
    using Cache = LevelCache<BITS>;
    static constexpr int COUNT = HEAD_DIM * PAGE_TOKENS;
    const uint8_t* keys;
    const uint8_t* values;
    const float* scales;
    alignas(64) uint8_t unpacked[BITS == 4 ? 2 * COUNT : 64];

    void open(const uint8_t* head) {
        scales = Cache::scales(const_cast<uint8_t*>(head));
        keys = head;
        values = head + Cache::HALF_BYTES;
        if constexpr (BITS == 4) {
            unpack(head);
            keys = unpacked;
            values = unpacked + COUNT;
        }
    }
    void unpack(const uint8_t* head) {
        const __m512i low = _mm512_set1_epi8(0x0F), eight = _mm512_set1_epi8(8);
        constexpr int HALF = HEAD_DIM / 2;
        for (int at = 0; at < HALF * PAGE_TOKENS; at += 64) {
            const __m512i two = _mm512_loadu_si512(head + at);
            _mm512_store_si512(unpacked + at, _mm512_and_si512(two, low));
            _mm512_store_si512(unpacked + HALF * PAGE_TOKENS + at, _mm512_and_si512(_mm512_srli_epi16(two, 4), low));
        }
        const uint8_t* from = head + Cache::HALF_BYTES;
        for (int quad = 0; quad < PAGE_TOKENS / 4; quad++)
            for (int d = 0; d < HALF; d += 16) {
                const __m512i two = _mm512_loadu_si512(from + (quad * HALF + d) * 4);
                uint8_t* to = unpacked + COUNT + (quad * HEAD_DIM + d) * 4;
                _mm512_store_si512(to, _mm512_sub_epi8(_mm512_and_si512(two, low), eight));
                _mm512_store_si512(to + HALF * 4,
                                   _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(two, 4), low), eight));
            }
    }
};

// Lines of `next` to ask for at each of COUNT places.
template <int BITS, int COUNT>
constexpr int LINES_AHEAD = (LevelCache<BITS>::HEAD_BYTES / 64 + COUNT - 1) / COUNT;

// The query heads of one token that share a key-value head.
template <int BITS>
struct LevelTile {
    using Cache = LevelCache<BITS>;
    static constexpr int ROWS = GROUP;
    const QueryHead* queries[ROWS];
    alignas(64) float sums[ROWS][HEAD_DIM] = {};
    alignas(64) uint8_t weights[ROWS][PAGE_TOKENS];
    Levels<BITS> levels;
    Softmax<ROWS> softmax;
    float steps[ROWS];

    void query(int r, const QueryHead* from) { queries[r] = from; }

    void page(const uint8_t* head, int begin, int, float softcap, const char* next) {
        levels.open(head);
        __m512i low[ROWS], high[ROWS];
        for (int r = 0; r < ROWS; r++) low[r] = high[r] = _mm512_setzero_si512();
        constexpr int LINES = LINES_AHEAD<BITS, HEAD_DIM / 4>;
        for (int d = 0; d < HEAD_DIM; d += 4) {
            prefetch(next + d / 4 * LINES * 64, LINES);
            const __m512i k0 = _mm512_loadu_si512(levels.keys + d * PAGE_TOKENS);
            const __m512i k1 = _mm512_loadu_si512(levels.keys + d * PAGE_TOKENS + 64);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                int32_t four;
                std::memcpy(&four, queries[r]->levels + d, sizeof four);
                low[r] = _mm512_dpbusd_epi32(low[r], k0, _mm512_set1_epi32(four));
                high[r] = _mm512_dpbusd_epi32(high[r], k1, _mm512_set1_epi32(four));
            }
        }
        const floats key_low = load(levels.scales), key_high = load(levels.scales + LANES);
        const floats value_low = load(levels.scales + PAGE_TOKENS), value_high = load(levels.scales + PAGE_TOKENS + LANES);
        for (int r = 0; r < ROWS; r++) {
            floats w0 = scores_of(low[r], *queries[r], Cache::ZERO, key_low);
            floats w1 = scores_of(high[r], *queries[r], Cache::ZERO, key_high);
            softmax.page(r, begin, softcap, w0, w1);
            w0 = with_value_scales(w0, value_low);
            w1 = with_value_scales(w1, value_high);
            const float most = largest(larger(w0, w1))[0];
            steps[r] = has_nan(w0 + w1) ? std::numeric_limits<float>::quiet_NaN() : most / 255.0f;
            const float inverse = most > 1e-30f ? 255.0f / most : 0.0f;
            store_bytes(weights[r], w0, inverse);
            store_bytes(weights[r] + LANES, w1, inverse);
        }
        constexpr int WIDE = ROWS <= 6 && HEAD_DIM % 64 == 0 ? 4 : ROWS <= 12 ? 2 : 1;
        for (int d = 0; d < HEAD_DIM; d += WIDE * LANES) {
            __m512i added[ROWS][WIDE];
            for (int r = 0; r < ROWS; r++)
                for (int i = 0; i < WIDE; i++) added[r][i] = _mm512_setzero_si512();
            for (int quad = 0; quad < PAGE_TOKENS / 4; quad++) {
                __m512i v[WIDE];
                for (int i = 0; i < WIDE; i++)
                    v[i] = _mm512_loadu_si512(levels.values + (quad * HEAD_DIM + d + i * LANES) * 4);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    int32_t four;
                    std::memcpy(&four, weights[r] + quad * 4, sizeof four);
                    const __m512i w = _mm512_set1_epi32(four);
#pragma GCC unroll 4
                    for (int i = 0; i < WIDE; i++) added[r][i] = _mm512_dpbusd_epi32(added[r][i], w, v[i]);
                }
            }
            for (int r = 0; r < ROWS; r++)
                for (int i = 0; i < WIDE; i++)
                    add_page(sums[r] + d + i * LANES, added[r][i], steps[r], softmax.fade[r]);
        }
    }
};

// The largest of each of 16 vectors.
inline floats row_maxima(const float (*rows)[LANES]) {
    const auto of = [](floats a, floats b) { return (floats)_mm512_max_ps((__m512)a, (__m512)b); };
    floats v[8], w[4], x[2];
    for (int i = 0; i < 8; i++) {
        const __m512 a = (__m512)load(rows[i]), b = (__m512)load(rows[i + 8]);
        v[i] = of((floats)_mm512_shuffle_f32x4(a, b, 0x44), (floats)_mm512_shuffle_f32x4(a, b, 0xEE));
    }
    for (int i = 0; i < 4; i++) {
        const __m512 a = (__m512)v[i], b = (__m512)v[i + 4];
        w[i] = of((floats)_mm512_shuffle_f32x4(a, b, 0x88), (floats)_mm512_shuffle_f32x4(a, b, 0xDD));
    }
    for (int i = 0; i < 2; i++) {
        const __m512 a = (__m512)w[i], b = (__m512)w[i + 2];
        x[i] = of((floats)_mm512_shuffle_ps(a, b, 0x44), (floats)_mm512_shuffle_ps(a, b, 0xEE));
    }
    const __m512 a = (__m512)x[0], b = (__m512)x[1];
    const floats y = of((floats)_mm512_shuffle_ps(a, b, 0x88), (floats)_mm512_shuffle_ps(a, b, 0xDD));
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return (floats)_mm512_permutexvar_ps(order, (__m512)y);
}

// Several tokens that read the same pages, of one sequence or of several. Their rows' softmax goes side by side.
template <int BITS>
struct LevelBlock {
    using Cache = LevelCache<BITS>;
    static constexpr int TOKENS = GROUP > 8 ? 1 : LANES / GROUP;
    static constexpr int ROWS = LANES;
    static constexpr int DEPTH = HEAD_DIM % 64 == 0 ? 64 : 32;  // bytes of a query that a tile takes
    int count;                                                 // rows in use; the others hold zeros
    alignas(64) uint8_t query_levels[HEAD_DIM / DEPTH][ROWS][DEPTH];
    alignas(64) int32_t products[4][ROWS][LANES];
    alignas(64) float w[2][ROWS][LANES];
    alignas(64) float peaks[ROWS][LANES];
    alignas(64) uint8_t weights[ROWS][PAGE_TOKENS];
    alignas(64) float top[ROWS], finite[ROWS], fade[ROWS], steps[ROWS], inverse[ROWS];
    alignas(64) float totals[ROWS][LANES];
    alignas(64) float sums[ROWS][HEAD_DIM];
    Levels<BITS> levels;
    const QueryHead* queries[ROWS];
    int reach[ROWS], since[ROWS];

    void begin(int rows) {
        count = rows;
        std::memset(query_levels, 0, sizeof query_levels);
        std::memset(weights, 0, sizeof weights);
        std::memset(peaks, 0, sizeof peaks);
        std::memset(totals, 0, sizeof totals);
        std::memset(sums, 0, sizeof sums);
        store(top, splat(-std::numeric_limits<float>::infinity()));
    }
    void query(int r, const QueryHead* from, int position, int window) {
        queries[r] = from;
        for (int d = 0; d < HEAD_DIM; d += DEPTH) std::memcpy(query_levels[d / DEPTH][r], from->levels + d, DEPTH);
        reach[r] = position + 1;
        since[r] = window && reach[r] > window ? reach[r] - window : 0;
    }

#if defined(__AMX_INT8__)
    // Tiles 0 to 3: results. 4: queries, 5: keys, 6: weights, 7: values.
    struct Shape : TileShape {
        constexpr Shape() {
            row_bytes[4] = DEPTH;
            rows[5] = DEPTH / 4;
            row_bytes[6] = PAGE_TOKENS;
            rows[7] = PAGE_TOKENS / 4;
        }
    };
    void score_by_tiles() {
        _tile_zero(0);
        _tile_zero(1);
        for (int d = 0; d < HEAD_DIM; d += DEPTH) {
            _tile_loadd(4, query_levels[d / DEPTH], DEPTH);
            _tile_loadd(5, levels.keys + d * PAGE_TOKENS, 4 * PAGE_TOKENS);
            _tile_dpbsud(0, 4, 5);
            _tile_loadd(5, levels.keys + d * PAGE_TOKENS + 64, 4 * PAGE_TOKENS);
            _tile_dpbsud(1, 4, 5);
        }
        _tile_stored(0, products[0], 64);
        _tile_stored(1, products[1], 64);
    }
    // Of channels d to d + 31.
    void add_by_tiles(int d) {
        _tile_zero(2);
        _tile_zero(3);
        _tile_loadd(7, levels.values + d * 4, 4 * HEAD_DIM);
        _tile_dpbusd(2, 6, 7);
        _tile_loadd(7, levels.values + (d + LANES) * 4, 4 * HEAD_DIM);
        _tile_dpbusd(3, 6, 7);
        _tile_stored(2, products[d / LANES % 4], 64);
        _tile_stored(3, products[d / LANES % 4 + 1], 64);
    }
#endif
    void score_by_dot_products() {
        for (int first = 0; first < count; first += GROUP) {
            __m512i low[GROUP], high[GROUP];
            for (int r = 0; r < GROUP; r++) low[r] = high[r] = _mm512_setzero_si512();
            for (int d = 0; d < HEAD_DIM; d += 4) {
                const __m512i k0 = _mm512_loadu_si512(levels.keys + d * PAGE_TOKENS);
                const __m512i k1 = _mm512_loadu_si512(levels.keys + d * PAGE_TOKENS + 64);
                for (int r = 0; r < GROUP; r++) {
                    int32_t four;
                    std::memcpy(&four, queries[first + r]->levels + d, sizeof four);
                    low[r] = _mm512_dpbusd_epi32(low[r], k0, _mm512_set1_epi32(four));
                    high[r] = _mm512_dpbusd_epi32(high[r], k1, _mm512_set1_epi32(four));
                }
            }
            for (int r = 0; r < GROUP; r++) {
                _mm512_store_si512(products[0][first + r], low[r]);
                _mm512_store_si512(products[1][first + r], high[r]);
            }
        }
    }
    void add_by_dot_products(int d) {
        for (int r = 0; r < count; r++) {
            __m512i added[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
            for (int quad = 0; quad < PAGE_TOKENS / 4; quad++) {
                int32_t four;
                std::memcpy(&four, weights[r] + quad * 4, sizeof four);
                const uint8_t* v = levels.values + (quad * HEAD_DIM + d) * 4;
                added[0] = _mm512_dpbusd_epi32(added[0], _mm512_set1_epi32(four), _mm512_loadu_si512(v));
                added[1] = _mm512_dpbusd_epi32(added[1], _mm512_set1_epi32(four), _mm512_loadu_si512(v + 64));
            }
            _mm512_store_si512(products[d / LANES % 4][r], added[0]);
            _mm512_store_si512(products[d / LANES % 4 + 1][r], added[1]);
        }
    }

    void page(const uint8_t* head, int begin, float softcap, const char* next, bool tiles) {
        levels.open(head);
#if defined(__AMX_INT8__)
        if (tiles)
            score_by_tiles();
        else
#endif
            score_by_dot_products();
        constexpr int LINES = LINES_AHEAD<BITS, ROWS>;
        const floats never = splat(-std::numeric_limits<float>::infinity());
        const floats key_low = load(levels.scales), key_high = load(levels.scales + LANES);
        __mmask16 active = 0, odd = 0;
        for (int r = 0; r < count; r++) {
            prefetch(next + r * LINES * 64, LINES);
            if (reach[r] <= begin || since[r] >= begin + PAGE_TOKENS) continue;  // sees nothing of this page
            active |= (__mmask16)(1 << r);
            floats low = scores_of(_mm512_load_si512(products[0][r]), *queries[r], Cache::ZERO, key_low);
            floats high = scores_of(_mm512_load_si512(products[1][r]), *queries[r], Cache::ZERO, key_high);
            if (softcap != 0.0f) {
                low = tanh_of(low / softcap) * softcap;
                high = tanh_of(high / softcap) * softcap;
            }
            if (reach[r] < begin + PAGE_TOKENS || since[r] > begin) {
                const ints token = LANE + begin;
                low = (token < reach[r]) & (token >= since[r]) ? low : never;
                high = (token + LANES < reach[r]) & (token + LANES >= since[r]) ? high : never;
            }
            store(w[0][r], low);
            store(w[1][r], high);
            store(peaks[r], larger(low, high));
        }
        const floats before = load(top);
        const floats most = (floats)_mm512_mask_mov_ps((__m512)before, active, (__m512)larger(row_maxima(peaks), before));
        const floats bounded = most == never ? floats{} : most;  // nothing seen yet
        store(finite, bounded);
        store(fade, exponential(before - bounded));
        store(top, most);
        const floats value_low = load(levels.scales + PAGE_TOKENS), value_high = load(levels.scales + PAGE_TOKENS + LANES);
        for (int r = 0; r < count; r++) {
            if (!(active >> r & 1)) continue;
            floats low = exponential(load(w[0][r]) - finite[r]), high = exponential(load(w[1][r]) - finite[r]);
            store(totals[r], faded_sum(load(totals[r]), splat(fade[r]), low, high));
            low = with_value_scales(low, value_low);
            high = with_value_scales(high, value_high);
            odd |= (__mmask16)(has_nan(low + high) << r);
            store(w[0][r], low);
            store(w[1][r], high);
            store(peaks[r], larger(low, high));
        }
        const floats highest = row_maxima(peaks);
        const __m512 nan = _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN());
        store(steps, (floats)_mm512_mask_mov_ps((__m512)(highest / 255.0f), odd, nan));
        store(inverse, highest > 1e-30f ? 255.0f / highest : floats{});
        for (int r = 0; r < count; r++) {
            store_bytes(weights[r], load(w[0][r]), inverse[r]);
            store_bytes(weights[r] + LANES, load(w[1][r]), inverse[r]);
        }
#if defined(__AMX_INT8__)
        if (tiles) _tile_loadd(6, weights, PAGE_TOKENS);
#endif
        for (int first = 0; first < HEAD_DIM; first += 4 * LANES) {
            const int wide = HEAD_DIM - first < 4 * LANES ? HEAD_DIM - first : 4 * LANES;
            for (int d = first; d < first + wide; d += 2 * LANES)
#if defined(__AMX_INT8__)
                if (tiles)
                    add_by_tiles(d);
                else
#endif
                    add_by_dot_products(d);
            for (int r = 0; r < count; r++) {
                if (!(active >> r & 1)) continue;
                for (int d = 0; d < wide; d += LANES)
                    add_page(sums[r] + first + d, _mm512_load_si512(products[d / LANES][r]), steps[r], splat(fade[r]));
            }
        }
    }

    // What the token's rows have come to, for it to go on alone.
    void hand_over(int token, LevelTile<BITS>& to) const {
        for (int g = 0; g < GROUP; g++) {
            const int r = token * GROUP + g;
            to.softmax.top[g] = splat(top[r]);
            to.softmax.total[g] = load(totals[r]);
            std::memcpy(to.sums[g], sums[r], sizeof to.sums[g]);
        }
    }
};

}  // namespace

#endif  // VNNI
