// The key-value cache: how a token's keys and values lie in a page, for each type that it may have.
//
// A page holds PAGE_TOKENS tokens of every key-value head, one head after the other. Different tokens never share a byte,
// so that rows may be stored by different threads.

#pragma once

#include "vectors.h"

namespace {

enum CacheKind { CACHE_FLOAT32 = 0, CACHE_BFLOAT16 = 1, CACHE_INT8 = 2, CACHE_INT4 = 3 };

// The block of the Hadamard transform for heads; it spreads outliers of a few channels, as for whole rows.
constexpr int KEY_BLOCK = HEAD_DIM % 64 == 0 ? 64 : 32;
// Rotated values make an attention output that is already what the next product takes, where its blocks fit into heads.
constexpr bool ROTATED_VALUES = HEAD_DIM % 64 == 0;

// A layer's pages, `stride` bytes from one to the next.
struct Pages {
    uint8_t* first;
    int64_t stride;

    uint8_t* at(int64_t page) const { return first + page * stride; }
};

// float32 or bfloat16. Keys [HEAD_DIM][PAGE_TOKENS], so that scores of neighbouring tokens form vectors; then values
// [PAGE_TOKENS][HEAD_DIM].
template <class T>
struct FloatCache {
    using Query = float;
    static constexpr int QUERY_SIZE = HEAD_DIM;
    Pages pages;
    int kv_heads;

    T* head(int64_t page, int kv_head) const {
        return (T*)pages.at(page) + (int64_t)kv_head * 2 * HEAD_DIM * PAGE_TOKENS;
    }
    void store_key(int64_t page, int kv_head, int offset, float* key) const {
        T* to = head(page, kv_head) + offset;
        for (int d = 0; d < HEAD_DIM; d++) put(to + d * PAGE_TOKENS, key[d]);
    }
    void store_value(int64_t page, int kv_head, int offset, float* value) const {
        T* to = head(page, kv_head) + HEAD_DIM * PAGE_TOKENS + offset * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; d++) put(to + d, value[d]);
    }
    void store_query(float* query, Query* to) const { std::memcpy(to, query, HEAD_DIM * sizeof(float)); }
};

// A query head for whole-number caches: value[d] = levels[d] * scale.
struct QueryHead {
    int8_t levels[HEAD_DIM];
    float scale;
    int32_t level_sum;
};

// 8 or 4 bits, one scale a token and head. Keys are stored as level + ZERO, [HEAD_DIM / 4][PAGE_TOKENS][4];
// values as signed levels [PAGE_TOKENS / 4][HEAD_DIM][4]: both as dot products of four take them. 4 bits: the low half of a
// byte holds one of the first HEAD_DIM / 2 channels, the high half the one HEAD_DIM / 2 further on. Then the scales of
// PAGE_TOKENS keys, then of values.
template <int BITS>
struct LevelCache {
    using Query = QueryHead;
    static constexpr int QUERY_SIZE = 1;
    static constexpr int ZERO = BITS == 8 ? 128 : 8;
    static constexpr int LARGEST = BITS == 8 ? 127 : 7;
    static constexpr int HALF_BYTES = HEAD_DIM * PAGE_TOKENS * BITS / 8;
    static constexpr int64_t HEAD_BYTES = 2 * HALF_BYTES + 2 * PAGE_TOKENS * sizeof(float);
    Pages pages;
    int kv_heads;

    uint8_t* head(int64_t page, int kv_head) const { return pages.at(page) + kv_head * HEAD_BYTES; }
    static float* scales(uint8_t* head) { return (float*)(head + 2 * HALF_BYTES); }

    // NaN goes into the scale.
    static float levels(const float* from, float most, int zero, uint8_t* to) {
        if (most != most) {
            std::memset(to, zero, HEAD_DIM);
            return most;
        }
        const float scale = most / (float)LARGEST;
        to_levels(from, HEAD_DIM, scale > 1e-30f ? 1.0f / scale : 0.0f, zero, to);
        return scale;
    }
    void store_key(int64_t page, int kv_head, int offset, float* key) const {
        const float most = rotate_blocks(key, HEAD_DIM, KEY_BLOCK);
        alignas(64) uint8_t level[HEAD_DIM];
        uint8_t* here = head(page, kv_head);
        scales(here)[offset] = levels(key, most, ZERO, level);
        uint8_t* to = here + offset * 4;
        if constexpr (BITS == 8)
            for (int d = 0; d < HEAD_DIM; d += 4) std::memcpy(to + d * PAGE_TOKENS, level + d, 4);
        else
            for (int d = 0; d < HEAD_DIM / 2; d++)
                to[d / 4 * 4 * PAGE_TOKENS + d % 4] = (uint8_t)(level[d] | level[d + HEAD_DIM / 2] << 4);
    }
    void store_value(int64_t page, int kv_head, int offset, float* value) const {
        const float most = ROTATED_VALUES ? rotate_blocks(value, HEAD_DIM, KEY_BLOCK) : magnitude(value, HEAD_DIM);
        alignas(64) uint8_t level[HEAD_DIM];
        uint8_t* here = head(page, kv_head);
        scales(here)[PAGE_TOKENS + offset] = levels(value, most, BITS == 8 ? 0 : 8, level);
        uint8_t* to = here + HALF_BYTES + offset / 4 * (HEAD_DIM * BITS / 2) + offset % 4;
        if constexpr (BITS == 8)
            for (int d = 0; d < HEAD_DIM; d++) to[d * 4] = level[d];
        else
            for (int d = 0; d < HEAD_DIM / 2; d++) to[d * 4] = (uint8_t)(level[d] | level[d + HEAD_DIM / 2] << 4);
    }
    void store_query(float* query, Query* to) const {
        const float most = rotate_blocks(query, HEAD_DIM, KEY_BLOCK);
        const float scale = most / 127.0f;
        to->level_sum = 0;
        if (most != most) {
            std::memset(to->levels, 0, HEAD_DIM);
        } else {
            to_levels(query, HEAD_DIM, scale > 1e-30f ? 1.0f / scale : 0.0f, 0, (uint8_t*)to->levels);
            int32_t total = 0;
            for (int d = 0; d < HEAD_DIM; d++) total += to->levels[d];
            to->level_sum = total;
        }
        to->scale = scale / (float)KEY_BLOCK;  // both sides were rotated by a transform that is not normalized
    }
};

}  // namespace
