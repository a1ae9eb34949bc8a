// Attention of each row over its own sequence's pages, in any kind of cache.
//
// Online softmax over the pages (arXiv 2205.14135). Tiles of several tokens share what they read; a row's result does not
// depend on its tile, because what is masked for it adds exact zeros. Where it holds NaN or infinity it does not, and the
// tile's rows are computed again by their tokens. Whole-number caches: levels.h.

#include "calls.h"
#include "levels.h"

#include <algorithm>
#include <vector>

namespace {

// Over float32 or bfloat16 pages.
template <class T, int TOKENS>
struct FloatTile {
    using Cache = FloatCache<T>;
    static constexpr int ROWS = TOKENS * GROUP;
    static constexpr int64_t HEAD_BYTES = 2 * HEAD_DIM * PAGE_TOKENS * sizeof(T);
    alignas(64) float queries[HEAD_DIM][ROWS];
    alignas(64) float sums[ROWS][HEAD_DIM] = {};
    alignas(64) float weights[ROWS][PAGE_TOKENS];
    Softmax<ROWS> softmax;

    void query(int r, const float* from) {
        for (int d = 0; d < HEAD_DIM; d++) queries[d][r] = from[d];
    }
    void page(const T* keys, int begin, int count, float softcap, const char* next) {
        const T* values = keys + HEAD_DIM * PAGE_TOKENS;
        floats low[ROWS] = {}, high[ROWS] = {};
        for (int d = 0; d < HEAD_DIM; d++) {
            prefetch(next + d * (HEAD_BYTES / HEAD_DIM), HEAD_BYTES / HEAD_DIM / 64);
            const floats k0 = load(keys + d * PAGE_TOKENS), k1 = load(keys + d * PAGE_TOKENS + LANES);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                low[r] += queries[d][r] * k0;
                high[r] += queries[d][r] * k1;
            }
        }
        for (int r = 0; r < ROWS; r++) {
            softmax.page(r, begin, softcap, low[r], high[r]);
            store(weights[r], low[r]);
            store(weights[r] + LANES, high[r]);
        }
        // A token that goes alone reads nothing that it does not see.
        const int from = TOKENS == 1 && softmax.since[0] > begin ? softmax.since[0] - begin : 0;
        for (int d = 0; d < HEAD_DIM; d += 2 * LANES) {
            floats a0[ROWS], a1[ROWS];
            for (int r = 0; r < ROWS; r++) {
                a0[r] = load(sums[r] + d) * softmax.fade[r];
                a1[r] = load(sums[r] + d + LANES) * softmax.fade[r];
            }
            for (int t = from; t < count; t++) {
                const floats v0 = load(values + t * HEAD_DIM + d), v1 = load(values + t * HEAD_DIM + d + LANES);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    a0[r] += weights[r][t] * v0;
                    a1[r] += weights[r][t] * v1;
                }
            }
            for (int r = 0; r < ROWS; r++) {
                store(sums[r] + d, a0[r]);
                store(sums[r] + d + LANES, a1[r]);
            }
        }
    }
};

// Whether the row is finite.
inline bool finish(float* to, const float* sums, floats total) {
    const float share = 1.0f / sum(total)[0];
    floats odd = {};
    for (int d = 0; d < HEAD_DIM; d += LANES) {
        const floats result = load(sums + d) * share;
        odd += result * 0.0f;
        store(to + d, result);
    }
    return !has_nan(odd);
}

// Nothing came before.
struct Beginning {
    template <class Tile> void operator()(Tile&) const {}
};

// TOKENS consecutive tokens of one sequence from `first_row` on, all query heads of one key-value head. `after` is what
// will be read next. `handed` puts into the tile what the pages before `done` have come to. Whether all rows are finite.
template <class Tile, class Handed = Beginning>
bool attend_tile(const typename Tile::Cache::Query* q, const Reading& reading, const typename Tile::Cache& cache,
                 const int32_t* pages, int64_t first_row, int kv_head, const void* after, float* out, int done = 0,
                 const Handed& handed = {}) {
    Tile tile;
    const auto head_of = [&](int r) {
        return (first_row + r / GROUP) * reading.heads + kv_head * GROUP + r % GROUP;
    };
    for (int r = 0; r < Tile::ROWS; r++) tile.query(r, q + head_of(r) * Tile::Cache::QUERY_SIZE);
    tile.softmax.begin(reading, first_row);
    const int end = tile.softmax.reach[Tile::ROWS - 1];
    handed(tile);
    const int first = std::max(tile.softmax.since[0] / PAGE_TOKENS, done) * PAGE_TOKENS;
    for (int begin = first; begin < end; begin += PAGE_TOKENS) {
        // Pages lie anywhere, which the processor cannot foresee: the next one is asked for while this one is used.
        const void* next = begin + PAGE_TOKENS < end ? cache.head(pages[begin / PAGE_TOKENS + 1], kv_head) : after;
        tile.page(cache.head(pages[begin / PAGE_TOKENS], kv_head), begin,
                  end - begin < PAGE_TOKENS ? end - begin : PAGE_TOKENS, reading.softcap, (const char*)next);
    }
    bool finite = true;
    for (int r = 0; r < Tile::ROWS; r++)
        finite &= finish(out + head_of(r) * HEAD_DIM, tile.sums[r], tile.softmax.total[r]);
    return finite;
}

// Every segment, by tiles of as many tokens as keep the accumulators in registers.
template <class Many, class One>
void attend_all(const typename One::Cache::Query* q, const Reading& reading, const typename One::Cache& cache,
                const int32_t* starts, const int32_t* table, int64_t segments, int64_t table_width, float* out,
                int threads) {
    constexpr int TOKENS = Many::ROWS / GROUP;
    int64_t work = 0;
    for (int64_t s = 0; s < segments; s++)
        work += (starts[s + 1] - starts[s]) * (reading.positions[starts[s + 1] - 1] + 1) * reading.heads * HEAD_DIM / 16;
    const auto first_page = [&](int64_t s, int kv_head) {
        const int since = reading.window ? reading.positions[starts[s]] + 1 - reading.window : 0;
        return cache.head(table[s * table_width + (since > 0 ? since / PAGE_TOKENS : 0)], kv_head);
    };
    // With few sequences a thread takes a head of one at a time; with many, some sequences whole, because then it knows
    // what it reads next.
    const int heads = segments >= 8 * threads ? cache.kv_heads : 1;
    const int64_t parts = cache.kv_heads / heads;
    const int64_t together = heads == 1 ? 1 : segments / (8 * threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (work > WORTH_THREADS)
    for (int64_t task = 0; task < (segments + together - 1) / together * parts; task++) {
        const int64_t begin = task / parts * together;
        const int64_t end = begin + together < segments ? begin + together : segments;
        const int first_head = (int)(task % parts) * heads;
        for (int64_t s = begin; s < end; s++) {
            for (int kv_head = first_head; kv_head < first_head + heads; kv_head++) {
                const int32_t* pages = table + s * table_width;
                const void* after = kv_head + 1 < first_head + heads ? first_page(s, kv_head + 1)
                                    : s + 1 < end                    ? first_page(s + 1, first_head)
                                                                     : first_page(s, kv_head);
                int64_t row = starts[s];
                const int64_t last = starts[s + 1];
                for (; row + TOKENS <= last; row += TOKENS) {
                    if (attend_tile<Many>(q, reading, cache, pages, row, kv_head, after, out)) continue;
                    // 0 times NaN is NaN: tokens that see none may have got it from those that they do not see.
                    for (int64_t alone = row; alone < row + TOKENS; alone++)
                        attend_tile<One>(q, reading, cache, pages, alone, kv_head, after, out);
                }
                for (; row < last; row++) attend_tile<One>(q, reading, cache, pages, row, kv_head, after, out);
            }
        }
    }
}

#if defined(__AVX512VNNI__)

// Tokens that go together while they read the same pages: consecutive ones of one sequence, or one each of several.
template <int TOKENS>
struct Company {
    int tokens;
    int same;  // so many pages from the first are the same for all of them
    int64_t rows[TOKENS];
    const int32_t* pages[TOKENS];
};

// All tokens of the step. Sequences that decode are sorted by their first page, so that those which begin alike meet.
template <int TOKENS>
std::vector<Company<TOKENS>> companies(const Reading& reading, const int32_t* starts, const int32_t* table,
                                       int64_t segments, int64_t table_width) {
    std::vector<Company<TOKENS>> all;
    std::vector<int64_t> single;
    const auto pages_read = [&](int64_t row) { return reading.positions[row] / PAGE_TOKENS + 1; };
    for (int64_t s = 0; s < segments; s++) {
        if (starts[s + 1] - starts[s] == 1) single.push_back(s);
        else
            for (int64_t row = starts[s]; row < starts[s + 1]; row += TOKENS) {
                Company<TOKENS> company{(int)std::min<int64_t>(TOKENS, starts[s + 1] - row), 0, {}, {}};
                for (int t = 0; t < company.tokens; t++) {
                    company.rows[t] = row + t;
                    company.pages[t] = table + s * table_width;
                }
                company.same = pages_read(row + company.tokens - 1);
                all.push_back(company);
            }
    }
    std::stable_sort(single.begin(), single.end(),
                     [&](int64_t a, int64_t b) { return table[a * table_width] < table[b * table_width]; });
    for (size_t at = 0; at < single.size(); at += TOKENS) {
        Company<TOKENS> company{(int)std::min<size_t>(TOKENS, single.size() - at), 0, {}, {}};
        for (int t = 0; t < company.tokens; t++) {
            company.rows[t] = starts[single[at + t]];
            company.pages[t] = table + single[at + t] * table_width;
            int same = 0;
            const int most = t ? std::min(company.same, pages_read(company.rows[t])) : pages_read(company.rows[0]);
            while (same < most && company.pages[t][same] == company.pages[0][same]) same++;
            company.same = same;
        }
        all.push_back(company);
    }
    return all;
}

// One key-value head of a company: together as far as pages are the same, then each token alone.
template <int BITS, int TOKENS>
void attend_company(const QueryHead* q, const Reading& reading, const LevelCache<BITS>& cache,
                    const Company<TOKENS>& company, int kv_head, const void* after, bool tiles, float* out) {
    using One = LevelTile<BITS>;
    LevelBlock<BITS> block;
    const auto head_of = [&](int t) { return company.rows[t] * reading.heads + kv_head * GROUP; };
    int done = 0;
    if (company.tokens > 1 && company.same > 0) {
        int first = company.same;
        block.begin(company.tokens * GROUP);
        for (int t = 0; t < company.tokens; t++) {
            for (int g = 0; g < GROUP; g++)
                block.query(t * GROUP + g, q + head_of(t) + g, reading.positions[company.rows[t]], reading.window);
            first = std::min(first, block.since[t * GROUP] / PAGE_TOKENS);
        }
        const auto page = [&](int index) { return cache.head(company.pages[0][index], kv_head); };
        for (int index = first; index < company.same; index++)
            block.page(page(index), index * PAGE_TOKENS, reading.softcap,
                       index + 1 < company.same ? (const char*)page(index + 1) : (const char*)after, tiles);
        done = company.same;
    }
    for (int t = 0; t < company.tokens; t++) {
        if (done > reading.positions[company.rows[t]] / PAGE_TOKENS) {
            for (int g = 0; g < GROUP; g++)
                finish(out + (head_of(t) + g) * HEAD_DIM, block.sums[t * GROUP + g], load(block.totals[t * GROUP + g]));
            continue;
        }
        const bool more = t + 1 < company.tokens && done <= reading.positions[company.rows[t + 1]] / PAGE_TOKENS;
        const void* next = more ? cache.head(company.pages[t + 1][done], kv_head) : after;
        attend_tile<One>(q, reading, cache, company.pages[t], company.rows[t], kv_head, next, out, done, [&](One& tile) {
            if (done) block.hand_over(t, tile);
        });
    }
}

template <int BITS>
void attend_levels(const QueryHead* q, const Reading& reading, const LevelCache<BITS>& cache, const int32_t* starts,
                   const int32_t* table, int64_t segments, int64_t table_width, float* out, int threads) {
    using Block = LevelBlock<BITS>;
    const auto all = companies<Block::TOKENS>(reading, starts, table, segments, table_width);
    int64_t work = 0;
    for (const auto& company : all)
        work += (reading.positions[company.rows[company.tokens - 1]] + 1) * company.tokens * reading.heads * HEAD_DIM / 16;
    // With few sequences a thread takes a head of one at a time; with many, some sequences whole, because then it knows
    // what it reads next.
    const int64_t count = (int64_t)all.size();
    const int heads = count >= 4 * threads ? cache.kv_heads : 1;
    const int64_t parts = cache.kv_heads / heads;
    const int64_t together = heads == 1 ? 1 : std::max<int64_t>(1, count / (16 * threads));
    bool tiles = false;
#if defined(__AMX_INT8__)
    static const typename Block::Shape shape;
    tiles = allowed_tiles();
#endif
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (work > WORTH_THREADS)
    for (int64_t task = 0; task < (count + together - 1) / together * parts; task++) {
        const int64_t begin = task / parts * together, end = std::min(begin + together, count);
        const int first_head = (int)(task % parts) * heads;
#if defined(__AMX_INT8__)
        if (tiles) _tile_loadconfig(&shape);
#endif
        for (int64_t c = begin; c < end; c++)
            for (int kv_head = first_head; kv_head < first_head + heads; kv_head++) {
                const auto first_page = [&](int64_t of, int head) {
                    const int since = reading.window ? reading.positions[all[of].rows[0]] + 1 - reading.window : 0;
                    return cache.head(all[of].pages[0][since > 0 ? since / PAGE_TOKENS : 0], head);
                };
                const void* after = kv_head + 1 < first_head + heads ? first_page(c, kv_head + 1)
                                    : c + 1 < end                    ? first_page(c + 1, first_head)
                                                                     : first_page(c, kv_head);
                attend_company(q, reading, cache, all[c], kv_head, after, tiles, out);
            }
#if defined(__AMX_INT8__)
        if (tiles) _tile_release();
#endif
    }
}

#endif  // VNNI

constexpr int TILE = GROUP >= 12 ? 1 : 12 / GROUP;

// Carries a type into a generic lambda.
template <class T> struct Type { using type = T; };

}  // namespace

extern "C" {

// scratch: float [rows, heads * HEAD_DIM]. UINT8 and INT8 rows take values' rotation over; for the others it is undone.
void penstock_attend(const void* q, const int32_t* positions, void* layer, int64_t page_stride, int cache_kind,
                     const int32_t* starts, const int32_t* table, int64_t segments, int64_t table_width, int kv_heads,
                     int window, float softcap, int64_t rows, int kind, void* out, float* out_scales, float* scratch, int threads) {
    const Reading reading{positions, (int64_t)kv_heads * GROUP, window, softcap};
    const Pages pages{(uint8_t*)layer, page_stride};
    const auto over = [&](auto cache, auto many, auto one) {
        using Cache = decltype(cache);
        using Many = typename decltype(many)::type;
        using One = typename decltype(one)::type;
        attend_all<Many, One>((const typename Cache::Query*)q, reading, cache, starts, table, segments, table_width, scratch,
                              threads);
    };
    switch (cache_kind) {
        case CACHE_FLOAT32:
            over(FloatCache<float>{pages, kv_heads}, Type<FloatTile<float, TILE>>{}, Type<FloatTile<float, 1>>{});
            break;
        case CACHE_BFLOAT16:
            over(FloatCache<uint16_t>{pages, kv_heads}, Type<FloatTile<uint16_t, TILE>>{},
                 Type<FloatTile<uint16_t, 1>>{});
            break;
#if defined(__AVX512VNNI__)
        case CACHE_INT8:
            attend_levels((const QueryHead*)q, reading, LevelCache<8>{pages, kv_heads}, starts, table, segments,
                          table_width, scratch, threads);
            break;
        case CACHE_INT4:
            attend_levels((const QueryHead*)q, reading, LevelCache<4>{pages, kv_heads}, starts, table, segments,
                          table_width, scratch, threads);
            break;
#endif
    }
    const int64_t width = (int64_t)kv_heads * GROUP * HEAD_DIM;
    const bool rotated = ROTATED_VALUES && cache_kind >= CACHE_INT8;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        float* here = scratch + row * width;
        if (rotated && kind < INT8) {
            rotate_blocks(here, width, KEY_BLOCK);
            for (int64_t i = 0; i < width; i += LANES) store(here + i, load(here + i) / (float)KEY_BLOCK);
        }
        emit(here, width, kind, out, row, out_scales, rotated && kind >= INT8);
    }
}

}  // extern "C"
