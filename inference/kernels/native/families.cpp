// What some families need beside the usual: norms of what is added, other activations, soft caps, routers of experts.

#include "calls.h"
#include "vectors.h"

namespace {

// Columns are always cut alike, whole vectors and then single ones, so that a row's bits are its own.
template <class Vectors, class Single>
inline void columns(int64_t width, Vectors vectors, Single single) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) vectors(i);
    for (; i < width; i++) single(i);
}

constexpr float ROOT_2_OVER_PI = 0.7978845608028654f, CUBE = 0.044715f, ROOT_HALF = 0.7071067811865476f;

}  // namespace

extern "C" {

// x += RMS norm of y * scales, by the weight `post`.
void penstock_add_post(float* x, const float* y, const float* scales, const float* post, float epsilon, int64_t rows,
                       int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        float* here = x + row * width;
        const float* added = y + row * width;
        const float factor = scales ? scales[row] : 1.0f;
        floats squares = {};
        float rest = 0.0f;
        columns(
            width,
            [&](int64_t i) {
                const floats v = load(added + i) * factor;
                squares += v * v;
            },
            [&](int64_t i) { rest += added[i] * factor * (added[i] * factor); });
        const float inverse = 1.0f / std::sqrt((sum(squares)[0] + rest) / (float)width + epsilon);
        columns(
            width,
            [&](int64_t i) { store(here + i, load(here + i) + load(added + i) * factor * inverse * load(post + i)); },
            [&](int64_t i) { here[i] += added[i] * factor * inverse * post[i]; });
    }
}

// x as rows of `kind`, without a norm.
void penstock_rows(const float* x, int64_t rows, int64_t width, int kind, void* out, float* out_scales, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        float* here = row_buffer(width);
        std::memcpy(here, x + row * width, width * sizeof(float));
        emit(here, width, kind, out, row, out_scales);
    }
}

// gelu(gate) * up; the gelu by tanh, or the exact one.
void penstock_gelu_mul(const float* y, const float* scales, int64_t rows, int64_t width, int by_tanh, int kind, void* out,
                       float* out_scales, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const float* gate = y + row * 2 * width;
        const float* up = gate + width;
        float* product = row_buffer(width);
        const float factor = scales ? scales[row] : 1.0f;
        const auto single = [&](int64_t i) {
            const float g = gate[i] * factor;
            const float share = by_tanh ? std::tanh(ROOT_2_OVER_PI * (g + CUBE * g * g * g)) : std::erf(g * ROOT_HALF);
            product[i] = 0.5f * g * (1.0f + share) * (up[i] * factor);
        };
        const auto vectors = [&](int64_t i) {
            const floats g = load(gate + i) * factor;
            const floats share = tanh_of((g + g * g * g * CUBE) * ROOT_2_OVER_PI);
            store(product + i, g * 0.5f * (share + 1.0f) * (load(up + i) * factor));
        };
        if (by_tanh)
            columns(width, vectors, single);
        else
            for (int64_t i = 0; i < width; i++) single(i);
        emit(product, width, kind, out, row, out_scales);
    }
}

// cap * tanh(y * scales / cap).
void penstock_soft_cap(const float* y, const float* scales, float cap, int64_t rows, int64_t width, float* out,
                       int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const float factor = (scales ? scales[row] : 1.0f) / cap;
        const float* from = y + row * width;
        float* to = out + row * width;
        columns(
            width, [&](int64_t i) { store(to + i, tanh_of(load(from + i) * factor) * cap); },
            [&](int64_t i) { to[i] = std::tanh(from[i] * factor) * cap; });
    }
}

// x times weights transposed: [rows, width] and [experts, width] to [rows, experts].
void penstock_route(const float* x, const float* weights, int64_t rows, int64_t width, int64_t experts, float* out,
                    int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width * experts > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const float* here = x + row * width;
        for (int64_t expert = 0; expert < experts; expert++) {
            const float* weight = weights + expert * width;
            floats products = {};
            float rest = 0.0f;
            columns(
                width, [&](int64_t i) { products += load(here + i) * load(weight + i); },
                [&](int64_t i) { rest += here[i] * weight[i]; });
            out[row * experts + expert] = sum(products)[0] + rest;
        }
    }
}

}  // extern "C"
