// Products of uint8 rows and int8 weights with whole-number sums, by AMX tiles or VNNI dot products.
//
// Both give the same bits for every number of rows and threads, because integer addition has no rounding. Weights lie in
// panels of 16 outputs; a panel is a run of tiles, each for 64 inputs: [16 quads of inputs][16 outputs][4 inputs], which
// is both the layout of an AMX B tile and 16 vectors for VNNI. Rows are padded to a multiple of 64 inputs, where the
// weights are 0. Rows hold level + 128, which `corrections` (128 times the sum of an output's weights) takes out again.

#include "vectors.h"

#include <vector>

#include <sys/syscall.h>
#include <unistd.h>

#if defined(__AVX512VNNI__)

namespace {

constexpr int64_t TILE_BYTES = 1024;

struct Product {
    const uint8_t* rows;
    int64_t stride;  // bytes from row to row, a multiple of 64
    int64_t count;
    const int8_t* panels;
    const float* scales;
    const int32_t* corrections;
    int64_t k_tiles;
    int64_t outputs;
    float* y;
    // Where given, y is not written: for each row the highest value that each lane has met, and in which panel. Panels
    // come in rising order, so the first of equals stays.
    float* best;       // [count][LANES]
    int32_t* best_at;  // [count][LANES]

    const int8_t* panel(int64_t index) const { return panels + index * k_tiles * TILE_BYTES; }
};

inline void finish(const Product& product, int64_t row, int64_t panel, __m512i sums) {
    const int64_t first = panel * LANES, left = product.outputs - first;
    const __mmask16 mask = left >= LANES ? 0xFFFF : (__mmask16)((1u << left) - 1);
    const __m512i correction = _mm512_maskz_loadu_epi32(mask, product.corrections + first);
    const __m512 scale = _mm512_maskz_loadu_ps(mask, product.scales + first);
    const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums, correction)), scale);
    if (product.best) {
        float* best = product.best + row * LANES;
        const __mmask16 higher = _mm512_mask_cmp_ps_mask(mask, value, _mm512_loadu_ps(best), _CMP_GT_OQ);
        _mm512_mask_storeu_ps(best, higher, value);
        _mm512_mask_storeu_epi32(product.best_at + row * LANES, higher, _mm512_set1_epi32((int)panel));
        return;
    }
    _mm512_mask_storeu_ps(product.y + row * product.outputs + first, mask, value);
}

// ROWS rows by PANELS panels, all inputs.
template <int ROWS, int PANELS>
void by_dot_products(const Product& product, int64_t row, int64_t panel) {
    __m512i sums[ROWS][PANELS];
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) sums[r][p] = _mm512_setzero_si512();
    const uint8_t* rows = product.rows + row * product.stride;
    const int8_t* weights = product.panel(panel);
    const int64_t apart = product.k_tiles * TILE_BYTES;
    for (int64_t quad = 0; quad < product.k_tiles * LANES; quad++) {
        __m512i w[PANELS];
        for (int p = 0; p < PANELS; p++) w[p] = _mm512_loadu_si512(weights + p * apart + quad * 64);
        if (ROWS == 1)
            for (int p = 0; p < PANELS; p++) __builtin_prefetch(weights + p * apart + quad * 64 + 1024);
        for (int r = 0; r < ROWS; r++) {
            int32_t four;
            std::memcpy(&four, rows + r * product.stride + quad * 4, sizeof four);
            const __m512i a = _mm512_set1_epi32(four);
            for (int p = 0; p < PANELS; p++) sums[r][p] = _mm512_dpbusd_epi32(sums[r][p], a, w[p]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) finish(product, row + r, panel + p, sums[r][p]);
}

template <int PANELS>
void rows_by_dot_products(const Product& product, int64_t first, int64_t last, int64_t panel) {
    int64_t row = first;
    for (; row + 6 <= last; row += 6) by_dot_products<6, PANELS>(product, row, panel);
    switch (last - row) {
        case 5: by_dot_products<5, PANELS>(product, row, panel); break;
        case 4: by_dot_products<4, PANELS>(product, row, panel); break;
        case 3: by_dot_products<3, PANELS>(product, row, panel); break;
        case 2: by_dot_products<2, PANELS>(product, row, panel); break;
        case 1: by_dot_products<1, PANELS>(product, row, panel); break;
    }
}

void panels_by_dot_products(const Product& product, int64_t first_row, int64_t last_row, int64_t panel, int64_t end) {
    for (; panel + 4 <= end; panel += 4) rows_by_dot_products<4>(product, first_row, last_row, panel);
    for (; panel < end; panel++) rows_by_dot_products<1>(product, first_row, last_row, panel);
}

#if defined(__AMX_INT8__)

// Fewer rows than this are done sooner by dot products than by a tile that is mostly empty.
constexpr int64_t WORTH_A_TILE = 5;

struct alignas(64) TileShape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// In memory of its own: GCC 12 takes the instruction to read 8 bytes only, and may leave out the rest of a local one.
const TileShape TILE_SHAPE;

bool allowed_tiles() {
    // Linux lends the tile registers to a process that asks (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA).
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return allowed;
}

// A_TILES tiles of 16 rows by B_TILES panels. `rows` may be a copy of the product's rows from `row` on; `count` of them
// are wanted.
template <int A_TILES, int B_TILES>
void by_tiles(const Product& product, const uint8_t* rows, int64_t row, int64_t count, int64_t panel) {
    const int64_t stride = product.stride, apart = product.k_tiles * TILE_BYTES;
    const int8_t* weights = product.panel(panel);
    _tile_zero(0);
    if constexpr (B_TILES > 1) _tile_zero(1);
    if constexpr (A_TILES > 1) _tile_zero(2);
    if constexpr (A_TILES > 1 && B_TILES > 1) _tile_zero(3);
    for (int64_t tile = 0; tile < product.k_tiles; tile++) {
        _tile_loadd(6, weights + tile * TILE_BYTES, 64);
        _tile_loadd(4, rows + tile * 64, stride);
        _tile_dpbusd(0, 4, 6);
        if constexpr (B_TILES > 1) {
            _tile_loadd(7, weights + apart + tile * TILE_BYTES, 64);
            _tile_dpbusd(1, 4, 7);
        }
        if constexpr (A_TILES > 1) {
            _tile_loadd(5, rows + 16 * stride + tile * 64, stride);
            _tile_dpbusd(2, 5, 6);
            if constexpr (B_TILES > 1) _tile_dpbusd(3, 5, 7);
        }
    }
    alignas(64) int32_t sums[A_TILES * B_TILES][16][16];
    _tile_stored(0, sums[0], 64);
    if constexpr (B_TILES > 1) _tile_stored(1, sums[1], 64);
    if constexpr (A_TILES > 1) _tile_stored(2, sums[B_TILES], 64);
    if constexpr (A_TILES > 1 && B_TILES > 1) _tile_stored(3, sums[3], 64);
    for (int64_t r = 0; r < count; r++)
        for (int p = 0; p < B_TILES; p++)
            finish(product, row + r, panel + p, _mm512_load_si512(sums[r / 16 * B_TILES + p][r % 16]));
}

template <int B_TILES>
void rows_by_tiles(const Product& product, const uint8_t* rest, int64_t panel) {
    int64_t row = 0;
    for (; row + 32 <= product.count; row += 32)
        by_tiles<2, B_TILES>(product, product.rows + row * product.stride, row, 32, panel);
    if (row + 16 <= product.count) {
        by_tiles<1, B_TILES>(product, product.rows + row * product.stride, row, 16, panel);
        row += 16;
    }
    if (row == product.count) return;
    if (rest)
        by_tiles<1, B_TILES>(product, rest, row, product.count - row, panel);
    else
        rows_by_dot_products<B_TILES>(product, row, product.count, panel);
}

// The rows after the last full tile, copied to where a whole tile may be read; null where dot products do them.
const uint8_t* copied_rest(const Product& product) {
    const int64_t rest = product.count % 16;
    if (rest < WORTH_A_TILE) return nullptr;
    static thread_local struct Buffer {
        uint8_t* data = nullptr;
        int64_t size = 0;
        ~Buffer() { std::free(data); }
    } buffer;
    const int64_t wanted = 16 * product.stride;
    if (buffer.size < wanted) {
        std::free(buffer.data);
        buffer.data = (uint8_t*)std::aligned_alloc(64, wanted);
        buffer.size = wanted;
        std::memset(buffer.data, 0, wanted);
    }
    std::memcpy(buffer.data, product.rows + (product.count - rest) * product.stride, rest * product.stride);
    return buffer.data;
}

#endif  // AMX

// The product's panels from `first` to `last`, by one thread.
void multiply(const Product& product, int64_t first, int64_t last) {
#if defined(__AMX_INT8__)
    if (product.count >= WORTH_A_TILE && allowed_tiles()) {
        _tile_loadconfig(&TILE_SHAPE);
        const uint8_t* rest = copied_rest(product);
        int64_t panel = first;
        for (; panel + 2 <= last; panel += 2) rows_by_tiles<2>(product, rest, panel);
        if (panel < last) rows_by_tiles<1>(product, rest, panel);
        _tile_release();
        return;
    }
#endif
    panels_by_dot_products(product, 0, product.count, first, last);
}

// Rows from `first` to `last` of the product.
Product some_rows(Product product, int64_t first, int64_t last) {
    product.rows += first * product.stride;
    product.y += first * product.outputs;
    product.count = last - first;
    return product;
}

// With this many rows a thread, its time goes into arithmetic.
constexpr int64_t ROWS_A_THREAD = 64;

// With few rows, threads share the weights, so that each is read from memory once. With many, they share the rows as the
// other kernels do: what a thread has made, it reads again itself, out of its own cache.
void multiply_by_threads(const Product& product, int threads) {
    const int64_t panels = (product.outputs + LANES - 1) / LANES;
    const bool by_rows = product.count >= ROWS_A_THREAD * threads;
    const int64_t whole = by_rows ? product.count : panels, share = (whole + threads - 1) / threads;
    const bool worth = product.count * panels * product.k_tiles * TILE_BYTES > 32 * WORTH_THREADS;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (worth)
    for (int part = 0; part < threads; part++) {
        const int64_t first = part * share, last = first + share < whole ? first + share : whole;
        if (first >= last) continue;
        if (by_rows)
            multiply(some_rows(product, first, last), 0, panels);
        else
            multiply(product, first, last);
    }
}

}  // namespace

extern "C" {

int penstock_has_dot_products() { return 1; }

// int8 levels [outputs, inputs] -> panels of ceil(outputs / 16) * ceil(inputs / 64) KiB, and int32 corrections [outputs].
void penstock_pack(const int8_t* levels, int64_t outputs, int64_t inputs, int8_t* panels, int32_t* corrections) {
    const int64_t k_tiles = (inputs + 63) / 64, count = (outputs + LANES - 1) / LANES;
    std::memset(panels, 0, count * k_tiles * TILE_BYTES);
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < outputs; n++) {
        int8_t* panel = panels + n / LANES * k_tiles * TILE_BYTES + n % LANES * 4;
        int32_t total = 0;
        for (int64_t k = 0; k < inputs; k++) {
            panel[k / 4 * 64 + k % 4] = levels[n * inputs + k];
            total += levels[n * inputs + k];
        }
        corrections[n] = 128 * total;
    }
}

// y [count, outputs] = (rows - 128) * weights^T * scales[output].
void penstock_matmul(const uint8_t* rows, int64_t stride, int64_t count, const int8_t* panels, const float* scales,
                     const int32_t* corrections, int64_t k_tiles, int64_t outputs, float* y, int threads) {
    multiply_by_threads({rows, stride, count, panels, scales, corrections, k_tiles, outputs, y, nullptr, nullptr}, threads);
}

// The highest of each row of that product, and its output, the lowest of equals: highest [count], at [count].
void penstock_matmul_best(const uint8_t* rows, int64_t stride, int64_t count, const int8_t* panels, const float* scales,
                          const int32_t* corrections, int64_t k_tiles, int64_t outputs, float* highest, int64_t* at,
                          int threads) {
    const int64_t panel_count = (outputs + LANES - 1) / LANES, share = (panel_count + threads - 1) / threads;
    std::vector<float> best(threads * count * LANES, -std::numeric_limits<float>::infinity());
    std::vector<int32_t> best_at(threads * count * LANES, 0);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int part = 0; part < threads; part++) {
        const int64_t first = part * share, last = first + share < panel_count ? first + share : panel_count;
        multiply({rows, stride, count, panels, scales, corrections, k_tiles, outputs, nullptr,
                  best.data() + part * count * LANES, best_at.data() + part * count * LANES},
                 first, last);
    }
    for (int64_t row = 0; row < count; row++) {
        highest[row] = -std::numeric_limits<float>::infinity();
        at[row] = 0;
        for (int part = 0; part < threads; part++)
            for (int lane = 0; lane < LANES; lane++) {
                const int64_t place = (part * count + row) * LANES + lane, output = best_at[place] * (int64_t)LANES + lane;
                if (best[place] > highest[row] || (best[place] == highest[row] && output < at[row])) {
                    highest[row] = best[place];
                    at[row] = output;
                }
            }
    }
}

}  // extern "C"

#else

extern "C" {
int penstock_has_dot_products() { return 0; }
void penstock_pack(const int8_t*, int64_t, int64_t, int8_t*, int32_t*) {}
void penstock_matmul(const uint8_t*, int64_t, int64_t, const int8_t*, const float*, const int32_t*, int64_t, int64_t,
                     float*, int) {}
void penstock_matmul_best(const uint8_t*, int64_t, int64_t, const int8_t*, const float*, const int32_t*, int64_t, int64_t,
                          float*, int64_t*, int) {}
}

#endif
