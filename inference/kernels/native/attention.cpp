// Attention of each row over its own sequence's pages, in any kind of cache.
//
// Online softmax over the pages (arXiv 2205.14135). Tiles of several tokens share what they read; a row's result does not
// depend on its tile, because what is masked for it adds exact zeros. Over whole-number caches both products are sums of
// integers: keys against rotated 8-bit queries, and weights of 8 bits a page against values (cf. arXiv 2410.02367).

#include "cache.h"

namespace {

struct Reading {
    const int32_t* positions;
    int64_t heads;
    int window;     // tokens that a row sees, itself included; 0: all
    float softcap;  // scores s become softcap * tanh(s / softcap); 0: they do not
};

const ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The running softmax of ROWS rows. `reach` is the first token that a row does not see, `since` the first that it does.
template <int ROWS>
struct Softmax {
    floats top[ROWS], total[ROWS], fade[ROWS];
    int reach[ROWS], since[ROWS];

    void begin(const Reading& reading, int64_t first_row) {
        for (int r = 0; r < ROWS; r++) {
            top[r] = splat(-std::numeric_limits<float>::infinity());
            total[r] = floats{};
            reach[r] = reading.positions[first_row + r / GROUP] + 1;
            since[r] = reading.window && reach[r] > reading.window ? reach[r] - reading.window : 0;
        }
    }
    // Scores of a page's tokens from `begin` on -> their weights, not yet divided by the total.
    void page(int r, int begin, float softcap, floats& low, floats& high) {
        if (softcap != 0.0f) {
            low = tanh_of(low / softcap) * softcap;
            high = tanh_of(high / softcap) * softcap;
        }
        const floats never = splat(-std::numeric_limits<float>::infinity());
        const ints token = LANE + begin;
        low = (token < reach[r]) & (token >= since[r]) ? low : never;
        high = (token + LANES < reach[r]) & (token + LANES >= since[r]) ? high : never;
        const floats most = larger(largest(larger(low, high)), top[r]);
        const floats finite = most == never ? floats{} : most;  // nothing seen yet
        low = exponential(low - finite);
        high = exponential(high - finite);
        fade[r] = exponential(top[r] - finite);
        top[r] = most;
        total[r] = total[r] * fade[r] + (low + high);
    }
};

inline void prefetch(const void* from, int lines) {
    for (int line = 0; line < lines; line++) __builtin_prefetch((const char*)from + line * 64);
}

// Over float32 or bfloat16 pages.
template <class T, int TOKENS>
struct FloatTile {
    using Cache = FloatCache<T>;
    static constexpr int ROWS = TOKENS * GROUP;
    static constexpr int64_t HEAD_BYTES = 2 * HEAD_DIM * PAGE_TOKENS * sizeof(T);
    alignas(64) float queries[HEAD_DIM][ROWS];
    alignas(64) float sums[ROWS][HEAD_DIM] = {};
    alignas(64) float weights[ROWS][PAGE_TOKENS];
    Softmax<ROWS> softmax;

    void query(int r, const float* from) {
        for (int d = 0; d < HEAD_DIM; d++) queries[d][r] = from[d];
    }
    void page(const T* keys, int begin, int count, float softcap, const char* next) {
        const T* values = keys + HEAD_DIM * PAGE_TOKENS;
        floats low[ROWS] = {}, high[ROWS] = {};
        for (int d = 0; d < HEAD_DIM; d++) {
            prefetch(next + d * (HEAD_BYTES / HEAD_DIM), HEAD_BYTES / HEAD_DIM / 64);
            const floats k0 = load(keys + d * PAGE_TOKENS), k1 = load(keys + d * PAGE_TOKENS + LANES);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                low[r] += queries[d][r] * k0;
                high[r] += queries[d][r] * k1;
            }
        }
        for (int r = 0; r < ROWS; r++) {
            softmax.page(r, begin, softcap, low[r], high[r]);
            store(weights[r], low[r]);
            store(weights[r] + LANES, high[r]);
        }
        for (int d = 0; d < HEAD_DIM; d += 2 * LANES) {
            floats a0[ROWS], a1[ROWS];
            for (int r = 0; r < ROWS; r++) {
                a0[r] = load(sums[r] + d) * softmax.fade[r];
                a1[r] = load(sums[r] + d + LANES) * softmax.fade[r];
            }
            for (int t = 0; t < count; t++) {
                const floats v0 = load(values + t * HEAD_DIM + d), v1 = load(values + t * HEAD_DIM + d + LANES);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    a0[r] += weights[r][t] * v0;
                    a1[r] += weights[r][t] * v1;
                }
            }
            for (int r = 0; r < ROWS; r++) {
                store(sums[r] + d, a0[r]);
                store(sums[r] + d + LANES, a1[r]);
            }
        }
    }
};

#if defined(__AVX512VNNI__)

// Over 8-bit or 4-bit pages.
template <int BITS, int TOKENS>
struct LevelTile {
    using Cache = LevelCache<BITS>;
    static constexpr int ROWS = TOKENS * GROUP;
    static constexpr int64_t HEAD_BYTES = Cache::HEAD_BYTES;
    static constexpr int LEVELS = HEAD_DIM * PAGE_TOKENS;
    const QueryHead* queries[ROWS];
    alignas(64) float sums[ROWS][HEAD_DIM] = {};
    alignas(64) uint8_t weights[ROWS][PAGE_TOKENS];
    alignas(64) uint8_t unpacked[BITS == 4 ? 2 * LEVELS : 64];
    Softmax<ROWS> softmax;
    float steps[ROWS];

    void query(int r, const QueryHead* from) { queries[r] = from; }

    // 4 bits: keys as they would lie in an 8-bit page, then values.
    void unpack(const uint8_t* head) {
        const __m512i low = _mm512_set1_epi8(0x0F), eight = _mm512_set1_epi8(8);
        constexpr int HALF = HEAD_DIM / 2;
        for (int at = 0; at < HALF * PAGE_TOKENS; at += 64) {
            const __m512i two = _mm512_loadu_si512(head + at);
            _mm512_store_si512(unpacked + at, _mm512_and_si512(two, low));
            _mm512_store_si512(unpacked + HALF * PAGE_TOKENS + at, _mm512_and_si512(_mm512_srli_epi16(two, 4), low));
        }
        const uint8_t* values = head + Cache::HALF_BYTES;
        for (int quad = 0; quad < PAGE_TOKENS / 4; quad++)
            for (int d = 0; d < HALF; d += 16) {
                const __m512i two = _mm512_loadu_si512(values + (quad * HALF + d) * 4);
                uint8_t* to = unpacked + LEVELS + (quad * HEAD_DIM + d) * 4;
                _mm512_store_si512(to, _mm512_sub_epi8(_mm512_and_si512(two, low), eight));
                _mm512_store_si512(to + HALF * 4,
                                   _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(two, 4), low), eight));
            }
    }
    void page(const uint8_t* head, int begin, int, float softcap, const char* next) {
        const float* scales = Cache::scales(const_cast<uint8_t*>(head));
        const uint8_t* keys = head;
        const uint8_t* values = head + Cache::HALF_BYTES;
        if constexpr (BITS == 4) {
            unpack(head);
            keys = unpacked;
            values = unpacked + LEVELS;
        }
        __m512i low[ROWS], high[ROWS];
        for (int r = 0; r < ROWS; r++) low[r] = high[r] = _mm512_setzero_si512();
        constexpr int LINES = (HEAD_BYTES / 64 + HEAD_DIM / 4 - 1) / (HEAD_DIM / 4);
        for (int d = 0; d < HEAD_DIM; d += 4) {
            prefetch(next + d / 4 * LINES * 64, LINES);
            const __m512i k0 = _mm512_loadu_si512(keys + d * PAGE_TOKENS);
            const __m512i k1 = _mm512_loadu_si512(keys + d * PAGE_TOKENS + 64);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                int32_t four;
                std::memcpy(&four, queries[r]->levels + d, sizeof four);
                low[r] = _mm512_dpbusd_epi32(low[r], k0, _mm512_set1_epi32(four));
                high[r] = _mm512_dpbusd_epi32(high[r], k1, _mm512_set1_epi32(four));
            }
        }
        const floats key_low = load(scales), key_high = load(scales + LANES);
        const floats value_low = load(scales + PAGE_TOKENS), value_high = load(scales + PAGE_TOKENS + LANES);
        for (int r = 0; r < ROWS; r++) {
            const __m512i zero = _mm512_set1_epi32(Cache::ZERO * queries[r]->level_sum);
            const floats s0 = (floats)_mm512_cvtepi32_ps(_mm512_sub_epi32(low[r], zero));
            const floats s1 = (floats)_mm512_cvtepi32_ps(_mm512_sub_epi32(high[r], zero));
            floats w0 = s0 * (key_low * queries[r]->scale), w1 = s1 * (key_high * queries[r]->scale);
            softmax.page(r, begin, softcap, w0, w1);
            // Values' scales go into the weights; where a weight is 0 the scale may be anything, NaN too.
            w0 = w0 > 0.0f ? w0 * value_low : w0;
            w1 = w1 > 0.0f ? w1 * value_high : w1;
            const float most = largest(larger(w0, w1))[0];
            steps[r] = has_nan(w0 + w1) ? std::numeric_limits<float>::quiet_NaN() : most / 255.0f;
            const float inverse = most > 1e-30f ? 255.0f / most : 0.0f;
            const __m128i b0 = _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32((__m512)(w0 * inverse)));
            const __m128i b1 = _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32((__m512)(w1 * inverse)));
            _mm_store_si128((__m128i*)weights[r], b0);
            _mm_store_si128((__m128i*)(weights[r] + LANES), b1);
        }
        constexpr int WIDE = ROWS <= 6 && HEAD_DIM % 64 == 0 ? 4 : ROWS <= 12 ? 2 : 1;
        for (int d = 0; d < HEAD_DIM; d += WIDE * LANES) {
            __m512i added[ROWS][WIDE];
            for (int r = 0; r < ROWS; r++)
                for (int i = 0; i < WIDE; i++) added[r][i] = _mm512_setzero_si512();
            for (int quad = 0; quad < PAGE_TOKENS / 4; quad++) {
                __m512i v[WIDE];
                for (int i = 0; i < WIDE; i++)
                    v[i] = _mm512_loadu_si512(values + (quad * HEAD_DIM + d + i * LANES) * 4);
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
                for (int i = 0; i < WIDE; i++) {
                    // Said outright which of the two products is rounded by itself: left to the compiler, it may be the
                    // one in tiles of one token and the other in tiles of several.
                    float* to = sums[r] + d + i * LANES;
                    const __m512 faded = _mm512_mul_ps((__m512)load(to), (__m512)softmax.fade[r]);
                    store(to, (floats)_mm512_fmadd_ps(_mm512_cvtepi32_ps(added[r][i]), _mm512_set1_ps(steps[r]), faded));
                }
        }
    }
};

#endif  // VNNI

// TOKENS consecutive tokens of one sequence from `first_row` on, all query heads of one key-value head. `after` is what
// will be read next.
template <class Tile>
void attend_tile(const typename Tile::Cache::Query* q, const Reading& reading, const typename Tile::Cache& cache,
                 const int32_t* pages, int64_t first_row, int kv_head, const void* after, float* out) {
    Tile tile;
    const auto head_of = [&](int r) {
        return (first_row + r / GROUP) * reading.heads + kv_head * GROUP + r % GROUP;
    };
    for (int r = 0; r < Tile::ROWS; r++) tile.query(r, q + head_of(r) * Tile::Cache::QUERY_SIZE);
    tile.softmax.begin(reading, first_row);
    const int end = tile.softmax.reach[Tile::ROWS - 1];
    const int first = tile.softmax.since[0] / PAGE_TOKENS * PAGE_TOKENS;
    for (int begin = first; begin < end; begin += PAGE_TOKENS) {
        // Pages lie anywhere, which the processor cannot foresee: the next one is asked for while this one is used.
        const void* next = begin + PAGE_TOKENS < end ? cache.head(pages[begin / PAGE_TOKENS + 1], kv_head) : after;
        tile.page(cache.head(pages[begin / PAGE_TOKENS], kv_head), begin,
                  end - begin < PAGE_TOKENS ? end - begin : PAGE_TOKENS, reading.softcap, (const char*)next);
    }
    for (int r = 0; r < Tile::ROWS; r++) {
        float* to = out + head_of(r) * HEAD_DIM;
        const float share = 1.0f / sum(tile.softmax.total[r])[0];
        for (int d = 0; d < HEAD_DIM; d += LANES) store(to + d, load(tile.sums[r] + d) * share);
    }
}

// Every segment, by tiles of as many tokens as keep the accumulators in registers.
template <class Many, class One>
void attend_all(const typename One::Cache::Query* q, const Reading& reading, const typename One::Cache& cache,
                const int32_t* starts, const int32_t* table, int64_t segments, int64_t table_width, float* out,
                int threads) {
    constexpr int TOKENS = Many::ROWS / GROUP;
    int64_t work = 0;
    for (int64_t s = 0; s < segments; s++)
        work += (starts[s + 1] - starts[s]) * (reading.positions[starts[s + 1] - 1] + 1) * reading.heads * HEAD_DIM / 16;
    const auto first_page = [&](int64_t s, int kv_head) {
        const int since = reading.window ? reading.positions[starts[s]] + 1 - reading.window : 0;
        return cache.head(table[s * table_width + (since > 0 ? since / PAGE_TOKENS : 0)], kv_head);
    };
    // With few sequences a thread takes a head of one at a time; with many, some sequences whole, because then it knows
    // what it reads next.
    const int heads = segments >= 8 * threads ? cache.kv_heads : 1;
    const int64_t parts = cache.kv_heads / heads;
    const int64_t together = heads == 1 ? 1 : segments / (8 * threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (work > WORTH_THREADS)
    for (int64_t task = 0; task < (segments + together - 1) / together * parts; task++) {
        const int64_t begin = task / parts * together;
        const int64_t end = begin + together < segments ? begin + together : segments;
        const int first_head = (int)(task % parts) * heads;
        for (int64_t s = begin; s < end; s++) {
            for (int kv_head = first_head; kv_head < first_head + heads; kv_head++) {
                const int32_t* pages = table + s * table_width;
                const void* after = kv_head + 1 < first_head + heads ? first_page(s, kv_head + 1)
                                    : s + 1 < end                    ? first_page(s + 1, first_head)
                                                                     : first_page(s, kv_head);
                int64_t row = starts[s];
                const int64_t last = starts[s + 1];
                for (; row + TOKENS <= last; row += TOKENS)
                    attend_tile<Many>(q, reading, cache, pages, row, kv_head, after, out);
                for (; row < last; row++) attend_tile<One>(q, reading, cache, pages, row, kv_head, after, out);
            }
        }
    }
}

constexpr int TILE = GROUP >= 12 ? 1 : 12 / GROUP;

// Carries a type into a generic lambda.
template <class T> struct Type { using type = T; };

}  // namespace

extern "C" {

// scratch: float [rows, heads * HEAD_DIM]. UINT8 and INT8 rows take values' rotation over; for the others it is undone.
void penstock_attend(const void* q, const int32_t* positions, void* layer, int cache_kind, const int32_t* starts,
                     const int32_t* table, int64_t segments, int64_t table_width, int kv_heads, int window, float softcap,
                     int64_t rows, int kind, void* out, float* out_scales, float* scratch, int threads) {
    const Reading reading{positions, (int64_t)kv_heads * GROUP, window, softcap};
    const auto over = [&](auto cache, auto many, auto one) {
        using Cache = decltype(cache);
        using Many = typename decltype(many)::type;
        using One = typename decltype(one)::type;
        attend_all<Many, One>((const typename Cache::Query*)q, reading, cache, starts, table, segments, table_width, scratch,
                              threads);
    };
    switch (cache_kind) {
        case CACHE_FLOAT32:
            over(FloatCache<float>{(float*)layer, kv_heads}, Type<FloatTile<float, TILE>>{}, Type<FloatTile<float, 1>>{});
            break;
        case CACHE_BFLOAT16:
            over(FloatCache<uint16_t>{(uint16_t*)layer, kv_heads}, Type<FloatTile<uint16_t, TILE>>{},
                 Type<FloatTile<uint16_t, 1>>{});
            break;
#if defined(__AVX512VNNI__)
        case CACHE_INT8:
            over(LevelCache<8>{(uint8_t*)layer, kv_heads}, Type<LevelTile<8, TILE>>{}, Type<LevelTile<8, 1>>{});
            break;
        case CACHE_INT4:
            over(LevelCache<4>{(uint8_t*)layer, kv_heads}, Type<LevelTile<4, TILE>>{}, Type<LevelTile<4, 1>>{});
            break;
#endif
    }
    const int64_t width = (int64_t)kv_heads * GROUP * HEAD_DIM;
    const bool rotated = ROTATED_VALUES && cache_kind >= CACHE_INT8;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        float* here = scratch + row * width;
        if (rotated && kind < INT8) {
            rotate_blocks(here, width, KEY_BLOCK);
            for (int64_t i = 0; i < width; i += LANES) store(here + i, load(here + i) / (float)KEY_BLOCK);
        }
        emit(here, width, kind, out, row, out_scales, rotated && kind >= INT8);
    }
}

}  // extern "C"
