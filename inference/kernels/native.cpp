// The kernels between the matrix products, for one head size and one number of query heads a key-value head.
//
// Compiled on the spot with -DHEAD_DIM=.. -DGROUP=.. -DPAGE_TOKENS=32. Vectors are GCC's and Clang's vector extension,
// which either lowers to whatever the processor has. Every row is computed by the same operations in the same order
// whatever the other rows are, so that a request's result does not depend on its neighbours.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#ifndef HEAD_DIM
#error "HEAD_DIM, GROUP and PAGE_TOKENS must be defined"
#endif
static_assert(HEAD_DIM % 32 == 0, "heads are handled 32 elements at a time");
static_assert(PAGE_TOKENS == 32, "scores of a page are two vectors");

namespace {

constexpr int LANES = 16;
using floats = float __attribute__((vector_size(64)));
using ints = int32_t __attribute__((vector_size(64)));
using shorts = uint16_t __attribute__((vector_size(32)));
using words = uint32_t __attribute__((vector_size(64)));
using bytes = int8_t __attribute__((vector_size(16)));

// Below this many elements a row loop is done sooner by one thread than by waking another.
constexpr int64_t WORTH_THREADS = 32768;

enum RowKind { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

inline floats load(const float* p) { floats v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, floats v) { std::memcpy(p, &v, sizeof v); }
inline floats load(const uint16_t* p) {
#ifdef __AVX512F__
    // The compiler would widen in halves.
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
    shorts bits; std::memcpy(&bits, p, sizeof bits);
    return (floats)(__builtin_convertvector(bits, words) << 16);
#endif
}
inline floats splat(float x) { return x - floats{}; }

inline uint16_t to_bfloat16(float x) {
    uint32_t bits; std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);  // to nearest even
}
inline void put(float* p, float x) { *p = x; }
inline void put(uint16_t* p, float x) { *p = to_bfloat16(x); }

// e^x: x = n ln 2 + r, a polynomial in r, and n added to the exponent. Exactly 1 at 0 and 0 below -87.
inline floats exponential(floats x) {
    const floats low = splat(-87.0f), high = splat(88.0f), magic = splat(12582912.0f);
    floats bounded = x < low ? low : x;
    bounded = bounded > high ? high : bounded;
    floats shifted = bounded * 1.44269504088896341f + magic;
    floats n = shifted - magic;
    floats r = bounded - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    floats p = splat(1.0f / 5040.0f);
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    floats result = (floats)((ints)p + ((ints)shifted << 23));
    return x < low ? floats{} : result;
}

// v with its lanes exchanged by lane ^ STEP.
template <int STEP> inline floats exchanged(floats v) {
#define AT(i) ((i) ^ STEP)
#ifdef __clang__
    return __builtin_shufflevector(v, v, AT(0), AT(1), AT(2), AT(3), AT(4), AT(5), AT(6), AT(7), AT(8), AT(9), AT(10),
                                   AT(11), AT(12), AT(13), AT(14), AT(15));
#else
    const ints order = {AT(0), AT(1), AT(2), AT(3), AT(4), AT(5), AT(6), AT(7),
                        AT(8), AT(9), AT(10), AT(11), AT(12), AT(13), AT(14), AT(15)};
    return __builtin_shuffle(v, order);
#endif
#undef AT
}
// Over all lanes, in a fixed order; every lane of the result holds it.
inline floats sum(floats v) {
    v += exchanged<8>(v);
    v += exchanged<4>(v);
    v += exchanged<2>(v);
    return v + exchanged<1>(v);
}
inline floats larger(floats a, floats b) { return a > b ? a : b; }
inline floats largest(floats v) {
    v = larger(v, exchanged<8>(v));
    v = larger(v, exchanged<4>(v));
    v = larger(v, exchanged<2>(v));
    return larger(v, exchanged<1>(v));
}
template <int STEP> inline floats butterfly(floats v) {
    floats sign;
    for (int lane = 0; lane < LANES; lane++) sign[lane] = lane & STEP ? -1.0f : 1.0f;
    return v * sign + exchanged<STEP>(v);
}

// The Walsh-Hadamard transform of blocks of 64 (or 32, or 16) elements in place, not normalized: the weights carry the
// factor. It spreads a row's outliers over their block, so that one int8 scale fits the whole row
// (QuaRot, arXiv 2404.00456). Nothing where the width has no such blocks; quant/rotation.py does the same.
void rotate_blocks(float* row, int64_t width) {
    const int64_t block = width % 64 == 0 ? 64 : width % 32 == 0 ? 32 : width % 16 == 0 ? 16 : 0;
    if (!block) return;
    for (int64_t start = 0; start < width; start += block) {
        floats v[4];
        const int count = (int)(block / LANES);
        for (int i = 0; i < count; i++)
            v[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(row + start + i * LANES)))));
        for (int step = 1; step < count; step *= 2)
            for (int i = 0; i < count; i++)
                if (!(i & step)) {
                    const floats a = v[i], b = v[i + step];
                    v[i] = a + b;
                    v[i + step] = a - b;
                }
        for (int i = 0; i < count; i++) store(row + start + i * LANES, v[i]);
    }
}

// One finished row, in the type that the next matrix product takes. int8: block-rotated (in place), and scaled by the
// row's own largest magnitude.
void emit(float* row, int64_t width, int kind, void* out, int64_t index, float* scales) {
    if (kind == FLOAT32) {
        float* target = (float*)out + index * width;
        if (target != row) std::memcpy(target, row, width * sizeof(float));
        return;
    }
    if (kind == BFLOAT16) {
        uint16_t* target = (uint16_t*)out + index * width;
        for (int64_t i = 0; i < width; i++) target[i] = to_bfloat16(row[i]);
        return;
    }
    rotate_blocks(row, width);
    int8_t* target = (int8_t*)out + index * width;
    floats top = {};
    ints odd = {};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        floats v = load(row + i), magnitude = v < 0.0f ? -v : v;
        top = magnitude > top ? magnitude : top;
        odd |= v != v;
    }
    float most = largest(top)[0];
    bool nan = false;
    for (int lane = 0; lane < LANES; lane++) nan |= odd[lane] != 0;
    for (int64_t j = i; j < width; j++) {
        most = std::fabs(row[j]) > most ? std::fabs(row[j]) : most;
        nan |= row[j] != row[j];
    }
    if (nan || most > std::numeric_limits<float>::max()) {
        // int8 cannot say NaN; the scale does, and carries it to the end.
        std::memset(target, 0, width);
        scales[index] = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    float scale = most / 127.0f;
    scale = scale > 1e-30f ? scale : 1e-30f;
    scales[index] = scale;
    const float inverse = 1.0f / scale;
    const floats magic = splat(12582912.0f);
    for (i = 0; i + LANES <= width; i += LANES) {
        floats rounded = load(row + i) * inverse + magic;
        ints levels = (ints)rounded - (ints)magic;
        bytes narrow = __builtin_convertvector(levels, bytes);
        std::memcpy(target + i, &narrow, sizeof narrow);
    }
    for (; i < width; i++) target[i] = (int8_t)std::nearbyintf(row[i] * inverse);
}

struct Segment {
    const int32_t* pages;
    int64_t first_row;
    int rows;
};

// TOKENS consecutive tokens of one sequence, all query heads of one key-value head: online softmax over the pages
// (arXiv 2205.14135). A row's result does not depend on TOKENS: what is masked for it adds exact zeros.
template <class KV, int TOKENS>
void attend_tile(const float* q, const int32_t* positions, const KV* layer, const int32_t* pages, int64_t first_row,
                 int kv_head, int kv_heads, float* out) {
    constexpr int ROWS = TOKENS * GROUP;
    const int64_t stride = (int64_t)kv_heads * GROUP * HEAD_DIM;
    alignas(64) float queries[HEAD_DIM][ROWS];
    alignas(64) float sums[ROWS][HEAD_DIM] = {};
    alignas(64) float weights[ROWS][PAGE_TOKENS];
    floats top[ROWS], total[ROWS];
    int reach[ROWS];
    for (int r = 0; r < ROWS; r++) {
        const int token = r / GROUP, head = kv_head * GROUP + r % GROUP;
        const float* from = q + (first_row + token) * stride + (int64_t)head * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; d++) queries[d][r] = from[d];
        top[r] = splat(-std::numeric_limits<float>::infinity());
        total[r] = floats{};
        reach[r] = positions[first_row + token] + 1;
    }
    const int end = reach[ROWS - 1];
    const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int begin = 0; begin < end; begin += PAGE_TOKENS) {
        const KV* keys = layer + ((int64_t)pages[begin / PAGE_TOKENS] * kv_heads + kv_head) * 2 * HEAD_DIM * PAGE_TOKENS;
        const KV* values = keys + HEAD_DIM * PAGE_TOKENS;
        // Pages lie anywhere, which the processor cannot foresee: the next one is asked for while this one is used.
        const int follow = begin + PAGE_TOKENS < end ? begin + PAGE_TOKENS : 0;
        const int next_head = follow || kv_head + 1 == kv_heads ? kv_head : kv_head + 1;
        const char* next = (const char*)(layer + ((int64_t)pages[follow / PAGE_TOKENS] * kv_heads + next_head) * 2 *
                                                     HEAD_DIM * PAGE_TOKENS);
        floats low[ROWS], high[ROWS];
        for (int r = 0; r < ROWS; r++) low[r] = high[r] = floats{};
        for (int d = 0; d < HEAD_DIM; d++) {
            for (int line = 0; line < 2 * (int)sizeof(KV) * PAGE_TOKENS; line += 64)
                __builtin_prefetch(next + d * 2 * (int)sizeof(KV) * PAGE_TOKENS + line);
            const floats k0 = load(keys + d * PAGE_TOKENS), k1 = load(keys + d * PAGE_TOKENS + LANES);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                low[r] += queries[d][r] * k0;
                high[r] += queries[d][r] * k1;
            }
        }
        floats fade[ROWS];
        const floats never = splat(-std::numeric_limits<float>::infinity());
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            floats s0 = lane < reach[r] - begin ? low[r] : never;
            floats s1 = lane < reach[r] - begin - LANES ? high[r] : never;
            const floats most = larger(largest(larger(s0, s1)), top[r]);
            const floats p0 = exponential(s0 - most), p1 = exponential(s1 - most);
            fade[r] = exponential(top[r] - most);
            top[r] = most;
            total[r] = total[r] * fade[r] + (p0 + p1);
            store(weights[r], p0);
            store(weights[r] + LANES, p1);
        }
        const int count = end - begin < PAGE_TOKENS ? end - begin : PAGE_TOKENS;
        for (int d = 0; d < HEAD_DIM; d += 2 * LANES) {
            floats a0[ROWS], a1[ROWS];
            for (int r = 0; r < ROWS; r++) {
                a0[r] = load(sums[r] + d) * fade[r];
                a1[r] = load(sums[r] + d + LANES) * fade[r];
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
    for (int r = 0; r < ROWS; r++) {
        const int token = r / GROUP, head = kv_head * GROUP + r % GROUP;
        float* to = out + (first_row + token) * stride + (int64_t)head * HEAD_DIM;
        const float share = 1.0f / sum(total[r])[0];
        for (int d = 0; d < HEAD_DIM; d += LANES) store(to + d, load(sums[r] + d) * share);
    }
}

// As many tokens at a time as keep the accumulators in registers.
constexpr int TILE = GROUP >= 12 ? 1 : 12 / GROUP;

template <class KV>
void attend_all(const float* q, const int32_t* positions, const KV* layer, const int32_t* starts, const int32_t* table,
                int64_t segments, int64_t table_width, int kv_heads, float* out, int threads) {
    int64_t work = 0;
    for (int64_t s = 0; s < segments; s++)
        work += (int64_t)(starts[s + 1] - starts[s]) * (positions[starts[s + 1] - 1] + 1) * kv_heads * GROUP * HEAD_DIM / 16;
    // Longest first would balance better; with a few sequences a thread, taking the next one free is good enough.
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) collapse(2) if (work > WORTH_THREADS)
    for (int64_t s = 0; s < segments; s++) {
        for (int kv_head = 0; kv_head < kv_heads; kv_head++) {
            const int32_t* pages = table + s * table_width;
            int64_t row = starts[s];
            const int64_t last = starts[s + 1];
            for (; row + TILE <= last; row += TILE)
                attend_tile<KV, TILE>(q, positions, layer, pages, row, kv_head, kv_heads, out);
            for (; row < last; row++)
                attend_tile<KV, 1>(q, positions, layer, pages, row, kv_head, kv_heads, out);
        }
    }
}

template <class KV>
void rotate_all(const float* y, const float* scales, const int32_t* positions, const int64_t* slots, const float* cosines,
                const float* sines, int64_t rows, int heads, int kv_heads, float q_scale, float* q, KV* layer,
                int threads) {
    constexpr int HALF = HEAD_DIM / 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * (heads + 2 * kv_heads) * HEAD_DIM > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const float* from = y + row * (int64_t)(heads + 2 * kv_heads) * HEAD_DIM;
        const float factor = scales ? scales[row] : 1.0f;
        const float* c = cosines + (int64_t)positions[row] * HALF;
        const float* s = sines + (int64_t)positions[row] * HALF;
        for (int head = 0; head < heads; head++, from += HEAD_DIM) {
            float* to = q + (row * heads + head) * (int64_t)HEAD_DIM;
            for (int i = 0; i < HALF; i++) {
                const float a = from[i] * factor, b = from[i + HALF] * factor;
                to[i] = (a * c[i] - b * s[i]) * q_scale;
                to[i + HALF] = (b * c[i] + a * s[i]) * q_scale;
            }
        }
        const int64_t page = slots[row] / PAGE_TOKENS, offset = slots[row] % PAGE_TOKENS;
        KV* base = layer + page * kv_heads * 2 * HEAD_DIM * PAGE_TOKENS;
        for (int head = 0; head < kv_heads; head++, from += HEAD_DIM) {
            KV* keys = base + (int64_t)head * 2 * HEAD_DIM * PAGE_TOKENS + offset;
            for (int i = 0; i < HALF; i++) {
                const float a = from[i] * factor, b = from[i + HALF] * factor;
                put(keys + i * PAGE_TOKENS, a * c[i] - b * s[i]);
                put(keys + (i + HALF) * PAGE_TOKENS, b * c[i] + a * s[i]);
            }
        }
        for (int head = 0; head < kv_heads; head++, from += HEAD_DIM) {
            KV* values = base + ((int64_t)head * 2 + 1) * HEAD_DIM * PAGE_TOKENS + offset * HEAD_DIM;
            for (int i = 0; i < HEAD_DIM; i++) put(values + i, from[i] * factor);
        }
    }
}

}  // namespace

extern "C" {

// x += y * scales where y is given; then, where weight is given, the RMS norm of x as rows of `kind`.
void penstock_add_norm(float* x, const float* y, const float* scales, const float* weight, float epsilon, int64_t rows,
                       int64_t width, int kind, void* out, float* out_scales, float* scratch, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        float* here = x + row * width;
        float* normed = scratch + row * width;
        floats squares = {};
        float rest = 0.0f;
        const float factor = scales ? scales[row] : 1.0f;
        const float* added = y ? y + row * width : nullptr;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            floats v = load(here + i);
            if (added) {
                v += load(added + i) * factor;
                store(here + i, v);
            }
            squares += v * v;
        }
        for (; i < width; i++) {
            if (added) here[i] += added[i] * factor;
            rest += here[i] * here[i];
        }
        if (!weight) continue;
        const float scale = 1.0f / std::sqrt((sum(squares)[0] + rest) / (float)width + epsilon);
        for (i = 0; i + LANES <= width; i += LANES) store(normed + i, load(here + i) * scale * load(weight + i));
        for (; i < width; i++) normed[i] = here[i] * scale * weight[i];
        emit(normed, width, kind, out, row, out_scales);
    }
}

void penstock_silu_mul(const float* y, const float* scales, int64_t rows, int64_t width, int kind, void* out,
                       float* out_scales, float* scratch, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const float* gate = y + row * 2 * width;
        const float* up = gate + width;
        float* product = scratch + row * width;
        const float factor = scales ? scales[row] : 1.0f;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            const floats g = load(gate + i) * factor;
            store(product + i, g / (exponential(-g) + 1.0f) * (load(up + i) * factor));
        }
        for (; i < width; i++) {
            const float g = gate[i] * factor;
            product[i] = g / (std::exp(-g) + 1.0f) * (up[i] * factor);
        }
        emit(product, width, kind, out, row, out_scales);
    }
}

void penstock_rotate_store(const float* y, const float* scales, const int32_t* positions, const int64_t* slots,
                           const float* cosines, const float* sines, int64_t rows, int heads, int kv_heads,
                           float q_scale, float* q, void* layer, int cache_is_float, int threads) {
    if (cache_is_float)
        rotate_all(y, scales, positions, slots, cosines, sines, rows, heads, kv_heads, q_scale, q, (float*)layer, threads);
    else
        rotate_all(y, scales, positions, slots, cosines, sines, rows, heads, kv_heads, q_scale, q, (uint16_t*)layer,
                   threads);
}

void penstock_attend(const float* q, const int32_t* positions, const void* layer, int cache_is_float,
                     const int32_t* starts, const int32_t* table, int64_t segments, int64_t table_width, int kv_heads,
                     int64_t rows, int kind, void* out, float* out_scales, float* scratch, int threads) {
    if (cache_is_float)
        attend_all(q, positions, (const float*)layer, starts, table, segments, table_width, kv_heads, scratch, threads);
    else
        attend_all(q, positions, (const uint16_t*)layer, starts, table, segments, table_width, kv_heads, scratch, threads);
    const int64_t width = (int64_t)kv_heads * GROUP * HEAD_DIM;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) emit(scratch + row * width, width, kind, out, row, out_scales);
}

}  // extern "C"
