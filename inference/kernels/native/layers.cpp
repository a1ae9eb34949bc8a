// A step through many layers in one call: what Python would otherwise call one after another, eight times a layer.

#include "calls.h"
#include "vectors.h"

namespace {

// As native/layers.py has them.
struct Matrix {
    const int8_t* panels;  // null where nibbles and factors are given
    const uint8_t* nibbles;
    const uint8_t* factors;
    int64_t group;
    const float* scales;
    const int32_t* corrections;
    int64_t tiles;
    int64_t outputs;
    const float* bias;  // null where it has none
};

struct Layer {
    Matrix qkv, o, gate_up, down;
    const float* attention_norm;
    const float* attention_post_norm;  // null where the family has none, as the next three
    const float* q_norm;
    const float* k_norm;
    const float* mlp_post_norm;
    const float* mlp_norm;
    const float* cosines;  // null where nothing is rotated
    const float* sines;
    int64_t window;
    int64_t rows_at_once;  // through the gated network
};

struct Rows {
    uint8_t* values;  // [rows, stride]
    int64_t stride;
    float* scales;  // [rows]
};

enum Activation { SILU = 0, GELU = 1, GELU_TANH = 2 };

struct Step {
    float* x;  // [rows, width], the residual stream
    int64_t rows, width;
    const int32_t* rotations;
    const int64_t* slots;
    const int32_t* positions;
    const int32_t* starts;
    const int32_t* table;
    int64_t segments, table_width;
    void* const* pages;  // of each layer
    int64_t page_stride, cache_kind, heads, kv_heads, norm_all_heads, rotated, activation, threads;
    float epsilon, query_scale, softcap;
    Rows normed, attended, activated;  // the last: values of so many rows as go through the network at once
    float* projected;  // [rows, the widest of qkv and gate_up]
    float* added;      // [rows, width]
    float* scratch;    // [rows, heads * HEAD_DIM]
    void* queries;
};

// y * scales + bias, in place: each rounded apart, as in model/feed_forward.py.
void add_bias(float* y, const float* scales, const float* bias, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        float* here = y + row * width;
        for (int64_t i = 0; i < width; i++) {
            float scaled = here[i] * scales[row];
            asm("" : "+x"(scaled));  // or the compiler would join the two
            here[i] = scaled + bias[i];
        }
    }
}

// `count` of the rows from `first` on, of which values begins with the first; returns the scales that y is still to be
// multiplied by, or null.
const float* multiply(const Matrix& m, const uint8_t* values, const Rows& rows, int64_t first, int64_t count, float* y,
                      int threads) {
    penstock_matmul(values, rows.stride, count, m.panels, m.nibbles, m.factors, m.group, m.scales,
                    m.corrections, m.tiles, m.outputs, y, threads);
    const float* scales = rows.scales + first;
    if (!m.bias) return scales;
    add_bias(y, scales, m.bias, count, m.outputs, threads);
    return nullptr;
}

// x += added * scales, by the norm `post` where there is one; then x, normed by `weight`, into `normed` unless it is null.
void add(const Step& s, const float* scales, const float* post, const float* weight) {
    const float* added = s.added;
    const int threads = (int)s.threads;
    if (post) {
        penstock_add_post(s.x, added, scales, post, s.epsilon, s.rows, s.width, threads);
        if (!weight) return;
        added = scales = nullptr;
    }
    penstock_add_norm(s.x, added, scales, weight, s.epsilon, s.rows, s.width, UINT8, s.normed.values, s.normed.scales, threads);
}

// Returns the scales of what it leaves in `added`, as `multiply` does.
const float* attend(const Step& s, const Layer& layer, void* pages) {
    const int threads = (int)s.threads;
    const float* scales = multiply(layer.qkv, s.normed.values, s.normed, 0, s.rows, s.projected, threads);
    penstock_rotate_store(s.projected, scales, s.rotations, s.slots, layer.cosines, layer.sines, s.rows, (int)s.heads,
                          (int)s.kv_heads, layer.q_norm, layer.k_norm, s.epsilon, (int)s.norm_all_heads,
                          layer.cosines ? (int)s.rotated : 0, s.query_scale, s.queries, pages, s.page_stride,
                          (int)s.cache_kind, threads);
    penstock_attend(s.queries, s.positions, pages, s.page_stride, (int)s.cache_kind, s.starts, s.table, s.segments,
                    s.table_width, (int)s.kv_heads, (int)layer.window, s.softcap, s.rows, UINT8, s.attended.values, s.attended.scales,
                    s.scratch, threads);
    return multiply(layer.o, s.attended.values, s.attended, 0, s.rows, s.added, threads);
}

const float* feed_forward(const Step& s, const Layer& layer) {
    const int threads = (int)s.threads;
    const int64_t inner = layer.gate_up.outputs / 2;
    const int64_t at_once = s.rows < 2 * layer.rows_at_once ? s.rows : layer.rows_at_once;
    for (int64_t first = 0; first < s.rows; first += at_once) {
        const int64_t count = first + at_once < s.rows ? at_once : s.rows - first;
        const uint8_t* normed = s.normed.values + first * s.normed.stride;
        const float* scales = multiply(layer.gate_up, normed, s.normed, first, count, s.projected, threads);
        // Always in the same place, which stays in the caches.
        uint8_t* out = s.activated.values;
        if (s.activation == SILU)
            penstock_silu_mul(s.projected, scales, count, inner, UINT8, out, s.activated.scales + first, threads);
        else
            penstock_gelu_mul(s.projected, scales, count, inner, s.activation == GELU_TANH, UINT8, out,
                              s.activated.scales + first, threads);
        multiply(layer.down, out, s.activated, first, count, s.added + first * s.width, threads);
    }
    return layer.down.bias ? nullptr : s.activated.scales;
}

}  // namespace

extern "C" {

// By which the caller sees that both mean the same structures.
int64_t penstock_step_bytes() { return sizeof(Step); }
int64_t penstock_layer_bytes() { return sizeof(Layer); }

// Layers `first` to `count` - 1, or to the one before which `due` was found not to be 0; returns the layer that comes next.
int64_t penstock_layers(const void* step, const void* layers, int64_t first, int64_t count, const volatile int32_t* due) {
    const Step& s = *(const Step*)step;
    const Layer* all = (const Layer*)layers;
    if (first == 0)
        penstock_add_norm(s.x, nullptr, nullptr, all[0].attention_norm, s.epsilon, s.rows, s.width, UINT8, s.normed.values,
                          s.normed.scales, (int)s.threads);
    for (int64_t index = first; index < count; index++) {
        if (index > first && due && *due) return index;
        const float* scales = attend(s, all[index], s.pages[index]);
        add(s, scales, all[index].attention_post_norm, all[index].mlp_norm);
        scales = feed_forward(s, all[index]);
        add(s, scales, all[index].mlp_post_norm, index + 1 < count ? all[index + 1].attention_norm : nullptr);
    }
    return count;
}

}  // extern "C"
