// The functions that both Python and the run of whole layers (layers.cpp) call; their own files say what they do.

#pragma once

#include <cstdint>

extern "C" {

void penstock_add_norm(float* x, const float* y, const float* scales, const float* weight, float epsilon, int64_t rows,
                       int64_t width, int kind, void* out, float* out_scales, int threads);
void penstock_add_post(float* x, const float* y, const float* scales, const float* post, float epsilon, int64_t rows,
                       int64_t width, int threads);
void penstock_silu_mul(const float* y, const float* scales, int64_t rows, int64_t width, int kind, void* out,
                       float* out_scales, int threads);
void penstock_gelu_mul(const float* y, const float* scales, int64_t rows, int64_t width, int by_tanh, int kind, void* out,
                       float* out_scales, int threads);
void penstock_rotate_store(const float* y, const float* scales, const int32_t* positions, const int64_t* slots,
                           const float* cosines, const float* sines, int64_t rows, int heads, int kv_heads,
                           const float* q_norm, const float* k_norm, float epsilon, int norm_all_heads, int rotated,
                           float q_scale, void* q, void* layer, int64_t page_stride, int cache_kind, int threads);
void penstock_attend(const void* q, const int32_t* positions, void* layer, int64_t page_stride, int cache_kind,
                     const int32_t* starts, const int32_t* table, int64_t segments, int64_t table_width, int kv_heads,
                     int window, float softcap, int64_t rows, int kind, void* out, float* out_scales, float* scratch, int threads);
void penstock_matmul(const uint8_t* rows, int64_t stride, int64_t count, const int8_t* panels, const uint8_t* nibbles,
                     const uint8_t* factors, int64_t group, const float* scales, const int32_t* corrections,
                     int64_t k_tiles, int64_t outputs, float* y, int threads);
}
