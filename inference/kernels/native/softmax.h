// The running softmax of rows over pages (arXiv 2205.14135).

#pragma once

#include "cache.h"

namespace {

struct Reading {
    const int32_t* positions;
    int64_t heads;
    int window;     // tokens that a row sees, itself included; 0: all
    float softcap;  // scores s become softcap * tanh(s / softcap); 0: they do not
};

const ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline floats faded_sum(floats total, floats fade, floats low, floats high) {
#ifdef __AVX512F__
    return (floats)_mm512_fmadd_ps((__m512)total, (__m512)fade, (__m512)(low + high));
#else
    return total * fade + (low + high);
#endif
}

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
        total[r] = faded_sum(total[r], fade[r], low, high);
    }
};

inline void prefetch(const void* from, int lines) {
    for (int line = 0; line < lines; line++) __builtin_prefetch((const char*)from + line * 64);
}

}  // namespace
