// The row-wise kernels between the matrix products: norms, residuals, activations.

#include "calls.h"
#include "vectors.h"

extern "C" {

// x += y * scales where y is given; then, where weight is given, the RMS norm of x as rows of `kind`.
void penstock_add_norm(float* x, const float* y, const float* scales, const float* weight, float epsilon, int64_t rows,
                       int64_t width, int kind, void* out, float* out_scales, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        float* here = x + row * width;
        float* normed = row_buffer(width);
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
                       float* out_scales, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const float* gate = y + row * 2 * width;
        const float* up = gate + width;
        float* product = row_buffer(width);
        const float factor = scales ? scales[row] : 1.0f;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            store(product + i, silu(load(gate + i) * factor) * (load(up + i) * factor));
        }
        for (; i < width; i++) {
            const float g = gate[i] * factor;
            product[i] = g / (std::exp(-g) + 1.0f) * (up[i] * factor);
        }
        emit(product, width, kind, out, row, out_scales);
    }
}

}  // extern "C"
