// Vectors, bfloat16, the exponential, and how a finished row is handed to the next matrix product.
//
// Vectors are GCC's and Clang's vector extension, which either lowers to whatever the processor has. Every row is
// computed by the same operations in the same order whatever the other rows are, so that a request's result does not
// depend on its neighbours.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

// Compiled for one head size and one number of query heads a key-value head.
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

enum RowKind { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, UINT8 = 3 };

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

// e^x: x = n ln 2 + r, a polynomial in r, and n added to the exponent. Exactly 1 at 0 and 0 far below.
inline floats exponential(floats x) {
#ifdef __AVX512F__
    // Results too small for a normal number would cost an interrupt each; NaN stays.
    const __m512 low = _mm512_set1_ps(-87.0f), bounded = _mm512_max_ps(low, (__m512)x);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(bounded, _mm512_set1_ps(1.44269504088896341f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), bounded);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720.0f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return (floats)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, low, _CMP_NLT_UQ), p, n);
#else
    const floats low = splat(-87.0f), high = splat(88.0f), magic = splat(12582912.0f);
    floats bounded = x < low ? low : x;
    bounded = bounded > high ? high : bounded;
    floats shifted = bounded * 1.44269504088896341f + magic;
    floats n = shifted - magic;
    floats r = bounded - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    floats p = splat(1.0f / 720.0f);
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    floats result = (floats)((ints)p + ((ints)shifted << 23));
    return x < low ? floats{} : result;
#endif
}

// 1 / x for x from 1 to 1e35.
inline floats reciprocal(floats x) {
#ifdef __AVX512F__
    const floats r = (floats)_mm512_rcp14_ps((__m512)x);
    return r * (2.0f - x * r);
#else
    return 1.0f / x;
#endif
}

// tanh x = 1 - 2 / (e^2x + 1)
inline floats tanh_of(floats x) { return 1.0f - 2.0f / (exponential(x * 2.0f) + 1.0f); }

// x / (1 + e^-x)
inline floats silu(floats x) {
    floats turned = -x;
    turned = turned > 80.0f ? splat(80.0f) : turned;  // NaN stays
    return x * reciprocal(exponential(turned) + 1.0f);
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

inline bool has_nan(floats v) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q) != 0;
#else
    const ints odd = v != v;
    int any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= odd[lane];
    return any != 0;
#endif
}

// The largest magnitude of what was seen. As whole numbers, magnitudes without their sign are in order, and infinity and
// NaN are above all others.
struct Magnitude {
    ints bits = {};
    int32_t rest = 0;

    void see(floats v) {
        const ints size = (ints)v & 0x7FFFFFFF;
        bits = size > bits ? size : bits;
    }
    void see(float x) {
        int32_t size;
        std::memcpy(&size, &x, 4);
        size &= 0x7FFFFFFF;
        rest = size > rest ? size : rest;
    }
    // NaN where one of them was NaN or infinite.
    float most() const {
        int32_t top = rest;
        for (int lane = 0; lane < LANES; lane++) top = bits[lane] > top ? bits[lane] : top;
        float value;
        std::memcpy(&value, &top, 4);
        return top < 0x7F800000 ? value : std::numeric_limits<float>::quiet_NaN();
    }
};

inline float magnitude(const float* row, int64_t width) {
    Magnitude seen;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) seen.see(load(row + i));
    for (; i < width; i++) seen.see(row[i]);
    return seen.most();
}

// The Walsh-Hadamard transform of blocks of 64 (or 32, or 16) elements in place, not normalized: the weights carry the
// factor. It spreads a row's outliers over their block, so that one int8 scale fits the whole row
// (QuaRot, arXiv 2404.00456). Nothing where the width has no such blocks; quant/rotation.py does the same.
//
// Returns the largest magnitude of the result, NaN where one is NaN or infinite.
inline float rotate_blocks(float* row, int64_t width, int64_t block) {
    Magnitude seen;
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
        for (int i = 0; i < count; i++) {
            seen.see(v[i]);
            store(row + start + i * LANES, v[i]);
        }
    }
    return seen.most();
}
inline float rotate_blocks(float* row, int64_t width) {
    const int64_t block = width % 64 == 0 ? 64 : width % 32 == 0 ? 32 : width % 16 == 0 ? 16 : 0;
    return block ? rotate_blocks(row, width, block) : magnitude(row, width);
}

// Nearest whole numbers (to even) of row * inverse, plus `zero`, as bytes.
inline void to_levels(const float* row, int64_t width, float inverse, int zero, uint8_t* to) {
    const floats magic = splat(12582912.0f);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const floats rounded = load(row + i) * inverse + magic;
        const ints levels = (ints)rounded - (ints)magic + zero;
        const bytes narrow = __builtin_convertvector(levels, bytes);
        std::memcpy(to + i, &narrow, sizeof narrow);
    }
    for (; i < width; i++) to[i] = (uint8_t)((int)std::nearbyintf(row[i] * inverse) + zero);
}

// Room for one float row a thread, which stays in the nearest cache.
inline float* row_buffer(int64_t width) {
    static thread_local struct Buffer {
        float* data = nullptr;
        int64_t width = 0;
        ~Buffer() { std::free(data); }
    } buffer;
    if (buffer.width < width) {
        std::free(buffer.data);
        buffer.width = (width + 63) / 64 * 64;
        buffer.data = (float*)std::aligned_alloc(64, buffer.width * sizeof(float));
    }
    return buffer.data;
}

// Bytes from one UINT8 row to the next: an odd number of cache lines, or rows of some widths would all want the same few
// places of the nearest cache.
inline int64_t padded(int64_t width) { return ((width + 63) / 64 | 1) * 64; }

// One finished row, in the type that the next matrix product takes. INT8 and UINT8: block-rotated in place (unless it is
// `rotated` already), and scaled by the row's own largest magnitude. UINT8 rows hold level + 128 and are `padded`.
inline void emit(float* row, int64_t width, int kind, void* out, int64_t index, float* scales, bool rotated = false) {
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
    const float most = rotated ? magnitude(row, width) : rotate_blocks(row, width);
    const int zero = kind == UINT8 ? 128 : 0;
    const int64_t stride = kind == UINT8 ? padded(width) : width;
    uint8_t* target = (uint8_t*)out + index * stride;
    if (stride > width) std::memset(target + width, zero, stride - width);
    if (most != most) {
        // Levels cannot say NaN; the scale does, and carries it to the end.
        std::memset(target, zero, width);
        scales[index] = most;
        return;
    }
    float scale = most / 127.0f;
    scale = scale > 1e-30f ? scale : 1e-30f;
    scales[index] = scale;
    to_levels(row, width, 1.0f / scale, zero, target);
}

}  // namespace
