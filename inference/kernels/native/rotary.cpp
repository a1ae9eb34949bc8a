// From the fused query, key and value product to queries and the cache: norms of heads, rotary embedding.

#include "calls.h"
#include "cache.h"

namespace {

// What a family of models does to its heads. Null or 0 where it does not.
struct Turn {
    const float* q_norm;  // [HEAD_DIM], or [heads * HEAD_DIM] where the norm is over all heads together
    const float* k_norm;
    float epsilon;
    int norm_all_heads;
    int rotated;  // channels of a head that are rotated, from the first; the tables have rotated / 2 columns
    float q_scale;
};

inline float inverse_norm(const float* from, int64_t width, float epsilon) {
    floats squares = {};
    for (int64_t i = 0; i < width; i += LANES) squares += load(from + i) * load(from + i);
    return 1.0f / std::sqrt(sum(squares)[0] / (float)width + epsilon);
}

inline void rotate_head(float* head, const float* c, const float* s, int half) {
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        const floats a = load(head + i), b = load(head + half + i);
        store(head + i, a * load(c + i) - b * load(s + i));
        store(head + half + i, b * load(c + i) + a * load(s + i));
    }
    for (; i < half; i++) {
        const float a = head[i], b = head[half + i];
        head[i] = a * c[i] - b * s[i];
        head[half + i] = b * c[i] + a * s[i];
    }
}

template <class Cache>
void rotate_all(const float* y, const float* scales, const int32_t* positions, const int64_t* slots, const float* cosines,
                const float* sines, int64_t rows, int heads, const Turn& turn, typename Cache::Query* q,
                const Cache& cache, int threads) {
    const int kv_heads = cache.kv_heads, half = turn.rotated / 2;
    const int64_t width = (int64_t)(heads + 2 * kv_heads) * HEAD_DIM;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const float* from = y + row * width;
        const float factor = scales ? scales[row] : 1.0f;
        const float* c = cosines + (int64_t)positions[row] * half;
        const float* s = sines + (int64_t)positions[row] * half;
        const int64_t page = slots[row] / PAGE_TOKENS;
        const int offset = (int)(slots[row] % PAGE_TOKENS);
        // With a norm over all heads, the heads' values are needed twice.
        const auto taken = [&](int index, float* head) {
            const float* source = from + (int64_t)index * HEAD_DIM;
            for (int d = 0; d < HEAD_DIM; d += LANES) store(head + d, load(source + d) * factor);
        };
        const auto norm_over = [&](int first, int count) {
            floats squares = {};
            alignas(64) float head[HEAD_DIM];
            for (int index = first; index < first + count; index++) {
                taken(index, head);
                for (int d = 0; d < HEAD_DIM; d += LANES) squares += load(head + d) * load(head + d);
            }
            return 1.0f / std::sqrt(sum(squares)[0] / (float)(count * HEAD_DIM) + turn.epsilon);
        };
        const bool all = turn.norm_all_heads;
        const float all_q = all && turn.q_norm ? norm_over(0, heads) : 1.0f;
        const float all_k = all && turn.k_norm ? norm_over(heads, kv_heads) : 1.0f;
        alignas(64) float head[HEAD_DIM];
        const auto normed = [&](const float* weight, int index, float over_all) {
            if (!weight) return;
            const float inverse = all ? over_all : inverse_norm(head, HEAD_DIM, turn.epsilon);
            const float* w = all ? weight + (int64_t)index * HEAD_DIM : weight;
            for (int d = 0; d < HEAD_DIM; d += LANES) store(head + d, load(head + d) * inverse * load(w + d));
        };
        for (int index = 0; index < heads; index++) {
            taken(index, head);
            normed(turn.q_norm, index, all_q);
            if (half) rotate_head(head, c, s, half);
            for (int d = 0; d < HEAD_DIM; d += LANES) store(head + d, load(head + d) * turn.q_scale);
            cache.store_query(head, q + (row * heads + index) * Cache::QUERY_SIZE);
        }
        for (int index = 0; index < kv_heads; index++) {
            taken(heads + index, head);
            normed(turn.k_norm, index, all_k);
            if (half) rotate_head(head, c, s, half);
            cache.store_key(page, index, offset, head);
            taken(heads + kv_heads + index, head);
            cache.store_value(page, index, offset, head);
        }
    }
}

}  // namespace

extern "C" {

// Bytes of one query head for each kind of cache.
int64_t penstock_query_bytes(int cache_kind) {
    return cache_kind >= CACHE_INT8 ? sizeof(QueryHead) : HEAD_DIM * sizeof(float);
}

void penstock_rotate_store(const float* y, const float* scales, const int32_t* positions, const int64_t* slots,
                           const float* cosines, const float* sines, int64_t rows, int heads, int kv_heads,
                           const float* q_norm, const float* k_norm, float epsilon, int norm_all_heads,
                           int rotated, float q_scale, void* q, void* layer, int64_t page_stride, int cache_kind,
                           int threads) {
    const Pages pages{(uint8_t*)layer, page_stride};
    const Turn turn{q_norm, k_norm, epsilon, norm_all_heads, rotated, q_scale};
    const auto run = [&](const auto& cache) {
        using Cache = std::decay_t<decltype(cache)>;
        rotate_all(y, scales, positions, slots, cosines, sines, rows, heads, turn, (typename Cache::Query*)q, cache, threads);
    };
    switch (cache_kind) {
        case CACHE_FLOAT32: return run(FloatCache<float>{pages, kv_heads});
        case CACHE_BFLOAT16: return run(FloatCache<uint16_t>{pages, kv_heads});
        case CACHE_INT8: return run(LevelCache<8>{pages, kv_heads});
        case CACHE_INT4: return run(LevelCache<4>{pages, kv_heads});
    }
}

}  // extern "C"
