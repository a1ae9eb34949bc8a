// Products of uint8 rows and int8 weights with whole-number sums, by AMX tiles or VNNI dot products.
//
// Both give the same bits for every number of rows and threads, because integer addition has no rounding. Weights lie in
// panels of 16 outputs; a panel is a run of tiles, each for 64 inputs: [16 quads of inputs][16 outputs][4 inputs], which
// is both the layout of an AMX B tile and 16 vectors for VNNI. Rows are padded to a multiple of 64 inputs, where the
// weights are 0. Rows hold level + 128, which `corrections` (128 times the sum of an output's weights) takes out again.

#include "calls.h"
#include "dots.h"
#include "nibbles.h"
#include "tiles.h"

#include <vector>

#if defined(__AVX512VNNI__)

namespace {

constexpr int64_t TILE_BYTES = 1024;

// Weights up to this size stay in each thread's own cache.
constexpr int64_t OWN_CACHE_BYTES = 2 * 1024 * 1024;

// A thread's own memory, which grows and is kept; zeroed when it grows.
struct Buffer {
    uint8_t* data = nullptr;
    int64_t size = 0;

    ~Buffer() { std::free(data); }
    uint8_t* of(int64_t wanted) {
        if (size < wanted) {
            std::free(data);
            data = (uint8_t*)std::aligned_alloc(64, wanted);
            size = wanted;
            std::memset(data, 0, wanted);
        }
        return data;
    }
};

struct Product {
    const uint8_t* rows;
    int64_t stride;  // bytes from row to row, a multiple of 64
    int64_t count;
    const int8_t* panels;  // from panel `from` on
    const float* scales;
    const int32_t* corrections;
    int64_t k_tiles;
    int64_t outputs;
    float* y;
    // Where given, y is not written: for each row the highest value that each lane has met, and in which panel. Panels
    // come in rising order, so the first of equals stays.
    float* best;       // [count][LANES]
    int32_t* best_at;  // [count][LANES]
    // Where given, `panels` is not: the weights are 4-bit, expanded a few panels at a time.
    const uint8_t* nibbles = nullptr;
    const uint8_t* factors = nullptr;
    int64_t group = 0;
    int64_t from = 0;
    bool comes_first = true;  // no rows before these have met the weights

    int64_t panel_count() const { return (outputs + LANES - 1) / LANES; }
    bool is_large() const { return !nibbles && panel_count() * k_tiles * TILE_BYTES > OWN_CACHE_BYTES; }
    const int8_t* panel(int64_t index) const { return panels + (index - from) * k_tiles * TILE_BYTES; }
    NibblePanel nibble_panel(int64_t index) const {
        return {nibbles + index * k_tiles * NIBBLE_TILE_BYTES, factors + index * (k_tiles * 64 / group) * FACTOR_BYTES, group};
    }
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
    const uint8_t* rows = product.rows + row * product.stride;
    const int8_t* weights = product.panel(panel);
    const int64_t apart = product.k_tiles * TILE_BYTES, quads = product.k_tiles * LANES;
    constexpr bool BY_ASSEMBLY = ROWS > 1 && PANELS == FOUR_PANELS;
    __m512i sums[BY_ASSEMBLY ? MOST_ROWS : ROWS][PANELS];
    if constexpr (BY_ASSEMBLY) {
        sum_four_panels<ROWS>(rows, product.stride, weights, apart, quads, sums[0]);
    } else {
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < PANELS; p++) sums[r][p] = _mm512_setzero_si512();
        for (int64_t quad = 0; quad < quads; quad++) {
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
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) finish(product, row + r, panel + p, sums[r][p]);
}

// The same from 4-bit weights, for few rows: each weight is expanded once, in registers.
template <int ROWS, int PANELS>
void by_dot_products_of_nibbles(const Product& product, int64_t panel) {
    __m512i sums[ROWS][PANELS];
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) sums[r][p] = _mm512_setzero_si512();
    NibblePanel panels[PANELS];
    for (int p = 0; p < PANELS; p++) panels[p] = product.nibble_panel(panel + p);
    for (int64_t half = 0; half < 2 * product.k_tiles; half++)
        for (int p = 0; p < PANELS; p++) {
            const Factors factors(panels[p].factors_of(half));
            const uint8_t* nibbles = panels[p].nibbles + half * NIBBLE_TILE_BYTES / 2;
            for (int64_t quad = 0; quad < QUADS_A_HALF; quad += 2) {
                _mm_prefetch((const char*)nibbles + quad * 32 + NIBBLES_AHEAD, _MM_HINT_T0);
                __m512i w[2];
                expand_pair(nibbles + quad * 32, factors, w);
                for (int r = 0; r < ROWS; r++) {
                    int32_t four[2];
                    std::memcpy(four, product.rows + r * product.stride + (half * QUADS_A_HALF + quad) * 4, sizeof four);
                    sums[r][p] = _mm512_dpbusd_epi32(sums[r][p], _mm512_set1_epi32(four[0]), w[0]);
                    sums[r][p] = _mm512_dpbusd_epi32(sums[r][p], _mm512_set1_epi32(four[1]), w[1]);
                }
            }
        }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) finish(product, r, panel + p, sums[r][p]);
}

constexpr int64_t FEW_ROWS = 4;

template <int PANELS>
void few_rows_by_nibbles(const Product& product, int64_t panel) {
    switch (product.count) {
        case 1: by_dot_products_of_nibbles<1, PANELS>(product, panel); break;
        case 2: by_dot_products_of_nibbles<2, PANELS>(product, panel); break;
        case 3: by_dot_products_of_nibbles<3, PANELS>(product, panel); break;
        case 4: by_dot_products_of_nibbles<4, PANELS>(product, panel); break;
    }
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

#if defined(__AMX_INT8__)

// Fewer rows than this are done sooner by dot products than by a tile that is mostly empty.
constexpr int64_t WORTH_A_TILE = 5;

const TileShape TILE_SHAPE;

// Weights to be asked for while a block of rows is computed: tiles are loaded just before they are used, and too few of
// them at a time to keep memory busy.
struct Ahead {
    const int8_t* from;
    int lines;  // for each tile of the block
    int runs = 1;
    int64_t apart = 0;

    void ask_for(int64_t tile) const {
        for (int run = 0; run < runs; run++)
            for (int line = 0; line < lines; line++)
                _mm_prefetch((const char*)from + run * apart + (tile * lines + line) * 64, _MM_HINT_T1);
    }
};

// Where a single block of rows meets panels longer than this, it asks for tiles of its own this far ahead: the next
// panels would be too far.
constexpr int64_t LONG_PANEL_TILES = 16, AHEAD_BYTES = 4096;

// A_TILES tiles of 16 rows by B_TILES panels. `rows` may be a copy of the product's rows from `row` on; `count` of them
// are wanted.
template <int A_TILES, int B_TILES>
void by_tiles(const Product& product, const uint8_t* rows, int64_t row, int64_t count, int64_t panel,
              const Ahead& ahead) {
    const int64_t stride = product.stride, apart = product.k_tiles * TILE_BYTES;
    const int8_t* weights = product.panel(panel);
    _tile_zero(0);
    if constexpr (B_TILES > 1) _tile_zero(1);
    if constexpr (A_TILES > 1) _tile_zero(2);
    if constexpr (A_TILES > 1 && B_TILES > 1) _tile_zero(3);
    for (int64_t tile = 0; tile < product.k_tiles; tile++) {
        ahead.ask_for(tile);
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
    // Each block of rows asks for its share of the next panels. What 4-bit weights were expanded to is near already.
    const int64_t blocks = (product.count + 31) / 32;
    const bool asks = product.comes_first && !product.nibbles;
    Ahead ahead{product.panel(panel + B_TILES), asks ? (int)((B_TILES * TILE_BYTES / 64 + blocks - 1) / blocks) : 0};
    if (asks && blocks == 1 && product.k_tiles > LONG_PANEL_TILES)
        ahead = {product.panel(panel) + AHEAD_BYTES, TILE_BYTES / 64, B_TILES, product.k_tiles * TILE_BYTES};
    const int64_t share = ahead.lines * product.k_tiles * 64;
    for (; row + 32 <= product.count; row += 32, ahead.from += share)
        by_tiles<2, B_TILES>(product, product.rows + row * product.stride, row, 32, panel, ahead);
    if (row + 16 <= product.count) {
        by_tiles<1, B_TILES>(product, product.rows + row * product.stride, row, 16, panel, ahead);
        row += 16;
        ahead.lines = 0;
    }
    if (row == product.count) return;
    if (rest)
        by_tiles<1, B_TILES>(product, rest, row, product.count - row, panel, ahead);
    else
        rows_by_dot_products<B_TILES>(product, row, product.count, panel);
}

// The rows after the last full tile, copied to where a whole tile may be read; null where they are fewer than `least`.
const uint8_t* copied_rest(const Product& product, int64_t least) {
    const int64_t rest = product.count % 16;
    if (rest < least) return nullptr;
    static thread_local Buffer buffer;
    uint8_t* data = buffer.of(16 * product.stride);
    std::memcpy(data, product.rows + (product.count - rest) * product.stride, rest * product.stride);
    return data;
}

// Up to this many rows are done in one pass over 4-bit weights, each tile of which is expanded just before it is used.
constexpr int64_t ONE_PASS_ROWS = 64, TILES_AHEAD = 4;

// A_TILES tiles of 16 rows by one panel of 4-bit weights. The last may be in `rest`.
template <int A_TILES>
void by_tiles_of_nibbles(const Product& product, const uint8_t* rest, int64_t panel) {
    const int64_t stride = product.stride;
    const NibblePanel weights = product.nibble_panel(panel);
    const uint8_t* rows[4];
    for (int a = 0; a < A_TILES; a++)
        rows[a] = rest && a == A_TILES - 1 ? rest : product.rows + a * 16 * stride;
    _tile_zero(0);
    if constexpr (A_TILES > 1) _tile_zero(1);
    if constexpr (A_TILES > 2) _tile_zero(2);
    if constexpr (A_TILES > 3) _tile_zero(3);
    alignas(64) int8_t levels[TILES_AHEAD * TILE_BYTES];
    for (int64_t first = 0; first < product.k_tiles; first += TILES_AHEAD) {
        const int64_t ahead = product.k_tiles - first < TILES_AHEAD ? product.k_tiles - first : TILES_AHEAD;
        expand_tiles(weights, first, ahead, levels);
        for (int64_t tile = 0; tile < ahead; tile++) {
            const int64_t at = (first + tile) * 64;
            _tile_loadd(6, levels + tile * TILE_BYTES, 64);
            _tile_loadd(4, rows[0] + at, stride);
            _tile_dpbusd(0, 4, 6);
            if constexpr (A_TILES > 1) {
                _tile_loadd(5, rows[1] + at, stride);
                _tile_dpbusd(1, 5, 6);
            }
            if constexpr (A_TILES > 2) {
                _tile_loadd(4, rows[2] + at, stride);
                _tile_dpbusd(2, 4, 6);
            }
            if constexpr (A_TILES > 3) {
                _tile_loadd(5, rows[3] + at, stride);
                _tile_dpbusd(3, 5, 6);
            }
        }
    }
    alignas(64) int32_t sums[A_TILES][16][16];
    _tile_stored(0, sums[0], 64);
    if constexpr (A_TILES > 1) _tile_stored(1, sums[1], 64);
    if constexpr (A_TILES > 2) _tile_stored(2, sums[2], 64);
    if constexpr (A_TILES > 3) _tile_stored(3, sums[3], 64);
    for (int64_t row = 0; row < product.count; row++)
        finish(product, row, panel, _mm512_load_si512(sums[row / 16][row % 16]));
}

void one_pass_of_nibbles(const Product& product, const uint8_t* rest, int64_t panel) {
    switch ((product.count + 15) / 16) {
        case 1: by_tiles_of_nibbles<1>(product, rest, panel); break;
        case 2: by_tiles_of_nibbles<2>(product, rest, panel); break;
        case 3: by_tiles_of_nibbles<3>(product, rest, panel); break;
        case 4: by_tiles_of_nibbles<4>(product, rest, panel); break;
    }
}

#endif  // AMX

// Rows from `first` to `last` of the product.
Product some_rows(Product product, int64_t first, int64_t last) {
    product.rows += first * product.stride;
    if (product.best) {
        product.best += first * LANES;
        product.best_at += first * LANES;
    } else {
        product.y += first * product.outputs;
    }
    product.comes_first = product.comes_first && first == 0;
    product.count = last - first;
    return product;
}

#if defined(__AMX_INT8__)

// Of a thread's own cache, so much is for weights and for rows each.
constexpr int64_t SHARE_BYTES = 640 * 1024;

int64_t group_of_panels(int64_t k_tiles) {
    const int64_t fitting = SHARE_BYTES / (k_tiles * TILE_BYTES) / 2 * 2;
    return fitting < 2 ? 2 : fitting > 16 ? 16 : fitting;
}

int64_t block_of_rows(int64_t stride) {
    const int64_t fitting = SHARE_BYTES / stride / 32 * 32;
    return fitting < 64 ? 64 : fitting;
}

#endif

// The product with int8 tiles for the panels from `first` to `last`: its own, or what 4-bit ones expand to.
Product with_levels(Product product, int64_t first, int64_t last) {
    if (!product.nibbles) return product;
    static thread_local Buffer buffer;
    const int64_t panel_bytes = product.k_tiles * TILE_BYTES;
    int8_t* tiles = (int8_t*)buffer.of((last - first) * panel_bytes);
    for (int64_t panel = first; panel < last; panel++)
        expand_tiles(product.nibble_panel(panel), 0, product.k_tiles, tiles + (panel - first) * panel_bytes);
    product.panels = tiles;
    product.from = first;
    return product;
}

// The product's panels from `first` to `last`, by one thread.
void multiply(const Product& product, int64_t first, int64_t last) {
#if defined(__AMX_INT8__)
    if (product.count >= WORTH_A_TILE && allowed_tiles()) {
        _tile_loadconfig(&TILE_SHAPE);
        const bool one_pass = product.nibbles && product.count <= ONE_PASS_ROWS;
        const uint8_t* rest = copied_rest(product, one_pass ? 1 : WORTH_A_TILE);
        if (one_pass)
            for (; first < last; first++) one_pass_of_nibbles(product, rest, first);
        // Panels stay in the thread's own cache while block after block of rows passes over them, and a block's rows
        // while panel after panel does.
        const int64_t group = group_of_panels(product.k_tiles), block = block_of_rows(product.stride);
        for (; first < last; first += group) {
            const int64_t end = first + group < last ? first + group : last;
            const Product levels = with_levels(product, first, end);
            for (int64_t row = 0; row < product.count; row += block) {
                const int64_t stop = row + block < product.count ? row + block : product.count;
                const Product rows = some_rows(levels, row, stop);
                const uint8_t* their_rest = stop == product.count ? rest : nullptr;
                int64_t panel = first;
                for (; panel + 2 <= end; panel += 2) rows_by_tiles<2>(rows, their_rest, panel);
                if (panel < end) rows_by_tiles<1>(rows, their_rest, panel);
            }
        }
        _tile_release();
        return;
    }
#endif
    if (product.nibbles && product.count <= FEW_ROWS) {
        for (; first + 2 <= last; first += 2) few_rows_by_nibbles<2>(product, first);
        if (first < last) few_rows_by_nibbles<1>(product, first);
        return;
    }
    for (; first + 4 <= last; first += 4)
        rows_by_dot_products<4>(with_levels(product, first, first + 4), 0, product.count, first);
    for (; first < last; first++) rows_by_dot_products<1>(with_levels(product, first, first + 1), 0, product.count, first);
}

// With this many rows a thread, its time goes into arithmetic.
constexpr int64_t ROWS_A_THREAD = 64;

// Multiplications of a product of some milliseconds, and the parts that each thread's share is cut into there.
constexpr int64_t LONG_PRODUCT = 1LL << 32;
constexpr int PARTS_A_THREAD = 8;

// Threads share the weights, so that each is read from memory, or expanded, once. Where there are many rows and weights
// small enough, they share the rows as the other kernels do: what a thread has made, it reads again itself, out of its
// own cache.
void multiply_by_threads(const Product& product, int threads) {
    const int64_t panels = product.panel_count();
    const bool by_rows = product.count >= ROWS_A_THREAD * threads && !product.nibbles && !product.is_large();
    const bool worth = product.count * panels * product.k_tiles * TILE_BYTES > 32 * WORTH_THREADS;
    // Where a core is lent for a while to whoever reads the next weights, the others take over its parts.
    const bool is_long = product.count * panels * product.k_tiles * TILE_BYTES > LONG_PRODUCT;
    const int64_t whole = by_rows ? product.count : panels, wanted = is_long ? threads * PARTS_A_THREAD : threads;
    const int64_t even = by_rows || !is_long ? 1 : 4, share = ((whole + wanted - 1) / wanted + even - 1) / even * even;
    const int parts = (int)((whole + share - 1) / share);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (worth)
    for (int part = 0; part < parts; part++) {
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

// 4-bit weights of quant/rotated.py: values [outputs, inputs / 2], steps and offsets [outputs, inputs / group] -> nibbles
// and factors (nibbles.h), zeroed before, and int32 corrections [outputs]. inputs: a multiple of 64 and of the group.
void penstock_pack_nibbles(const uint8_t* values, const uint8_t* steps, const int8_t* offsets, int64_t outputs,
                           int64_t inputs, int64_t group, uint8_t* nibbles, uint8_t* factors, int32_t* corrections) {
    const int64_t k_tiles = inputs / 64, groups = inputs / group, panels = (outputs + LANES - 1) / LANES;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t lane = 0; lane < LANES && panel * LANES + lane < outputs; lane++) {
            const int64_t n = panel * LANES + lane;
            uint8_t* own_factors = factors + panel * groups * FACTOR_BYTES + lane;
            for (int64_t g = 0; g < groups; g++) {
                own_factors[g * FACTOR_BYTES] = steps[n * groups + g];
                own_factors[g * FACTOR_BYTES + LANES] = (uint8_t)offsets[n * groups + g];
            }
            int32_t total = 0;
            for (int64_t k = 0; k < inputs; k++) {
                const int q = values[(n * inputs + k) / 2] >> k % 2 * 4 & 15, g = (int)(k / group);
                const NibblePlace place(k % 64, lane);
                nibbles[(panel * k_tiles + k / 64) * NIBBLE_TILE_BYTES + place.byte] |= (uint8_t)(q << place.shift);
                total += (q * steps[n * groups + g] >> 4) + offsets[n * groups + g];
            }
            corrections[n] = 128 * total;
        }
}

// y [count, outputs] = (rows - 128) * weights^T * scales[output]. The weights: int8 panels, or nibbles and factors.
void penstock_matmul(const uint8_t* rows, int64_t stride, int64_t count, const int8_t* panels, const uint8_t* nibbles,
                     const uint8_t* factors, int64_t group, const float* scales, const int32_t* corrections,
                     int64_t k_tiles, int64_t outputs, float* y, int threads) {
    multiply_by_threads({rows, stride, count, panels, scales, corrections, k_tiles, outputs, y, nullptr, nullptr, nibbles,
                         factors, group},
                        threads);
}

// The highest of each row of that product, and its output, the lowest of equals: highest [count], at [count].
void penstock_matmul_best(const uint8_t* rows, int64_t stride, int64_t count, const int8_t* panels,
                          const uint8_t* nibbles, const uint8_t* factors, int64_t group, const float* scales,
                          const int32_t* corrections, int64_t k_tiles, int64_t outputs, float* highest, int64_t* at,
                          int threads) {
    const int64_t panel_count = (outputs + LANES - 1) / LANES, share = (panel_count + threads - 1) / threads;
    std::vector<float> best(threads * count * LANES, -std::numeric_limits<float>::infinity());
    std::vector<int32_t> best_at(threads * count * LANES, 0);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int part = 0; part < threads; part++) {
        const int64_t first = part * share, last = first + share < panel_count ? first + share : panel_count;
        multiply({rows, stride, count, panels, scales, corrections, k_tiles, outputs, nullptr,
                  best.data() + part * count * LANES, best_at.data() + part * count * LANES, nibbles, factors, group},
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
void penstock_pack_nibbles(const uint8_t*, const uint8_t*, const int8_t*, int64_t, int64_t, int64_t, uint8_t*, uint8_t*,
                           int32_t*) {}
void penstock_matmul(const uint8_t*, int64_t, int64_t, const int8_t*, const uint8_t*, const uint8_t*, int64_t,
                     const float*, const int32_t*, int64_t, int64_t, float*, int) {}
void penstock_matmul_best(const uint8_t*, int64_t, int64_t, const int8_t*, const uint8_t*, const uint8_t*, int64_t,
                          const float*, const int32_t*, int64_t, int64_t, float*, int64_t*, int) {}
}

#endif
