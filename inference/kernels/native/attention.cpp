// Rotary embedding, the key-value cache in float32 or bfloat16, and attention over it.

#include "vectors.h"

namespace {

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
