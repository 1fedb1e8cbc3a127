// Attention over pages of KV, on a CPU. native.py compiles this file, and attention.py describes the operator.
//
// A tile is a few query vectors of one row that share a KV head: its query heads times a run of query columns. A task is
// the tiles of one or several KV heads, whose keys and values lie side by side, for the same columns. KV is
// read in blocks of BLOCK columns, with an online softmax (Milakov, Gimelshein 2018; Dao et al. 2022). Blocks begin at
// multiples of BLOCK, sums run in the order of columns, and a column outside a query vector's attention has the weight
// zero. So a query vector's result depends only on its position and on the columns that it attends to.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int BLOCK = 64;        // KV columns that are read at once
constexpr int TILE = 128;        // query vectors of a tile, unless more heads share a KV head
constexpr int SHARED = 64;       // query vectors that a task may have if it has several KV heads
constexpr int TASKS = 4;         // tasks of a thread, if there are enough heads
constexpr int ORDERED = 4;       // a task with at least this many KV heads reads memory in order
constexpr int AHEAD = 16;        // columns of the next block that such a task fetches while it computes a block
constexpr int ENDS = 2;          // columns whose weights are added up by page: the first and the last live one
constexpr int MANY = 4;          // with at least this many query vectors, transposing a block of keys pays
constexpr int64_t ALONE = 1 << 15;  // with fewer multiplications than this, waking other threads costs more than it saves
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

inline Floats all(float x) { return x - Floats{}; }

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline Floats load(const BFloat16* from) {
  Halves x;
  std::memcpy(&x, from, sizeof x);
  const Words shifted = __builtin_convertvector(x, Words) << 16;
  return (Floats)shifted;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline Floats greater(Floats a, Floats b) { return a > b ? a : b; }

// Lane l of the result is a[l] + a[l ^ STEP] where bit STEP of l is clear, and b[l] + b[l ^ STEP] where it is set.
template <int STEP, int... L>
inline Floats halve(Floats a, Floats b, std::integer_sequence<int, L...>) {
  const Ints own = {((L & STEP) ? LANES + L : L)...};
  const Ints other = {((L & STEP) ? LANES + (L ^ STEP) : (L ^ STEP))...};
  return __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, other);
}

// Lane l of the result is the sum of x[l]'s lanes, for each l in the same order.
template <int STEP = 1>
inline Floats sums(Floats* x) {
  if constexpr (STEP == LANES) {
    return x[0];
  } else {
    for (int i = 0; i < LANES / STEP; i += 2)
      x[i / 2] = halve<STEP>(x[i], x[i + 1], std::make_integer_sequence<int, LANES>());
    return sums<STEP * 2>(x);
  }
}

template <int STEP, int... L>
inline void exchange(Floats& a, Floats& b, std::integer_sequence<int, L...>) {
  const Ints even = {((L & STEP) ? LANES + L - STEP : L)...};
  const Ints odd = {((L & STEP) ? LANES + L : L + STEP)...};
  const Floats x = a;
  a = __builtin_shuffle(x, b, even);
  b = __builtin_shuffle(x, b, odd);
}

// Swaps lane l of x[i] with lane i of x[l].
template <int STEP = 1>
inline void transpose(Floats* x) {
  if constexpr (STEP < LANES) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
      if (!(i & STEP)) exchange<STEP>(x[i], x[i + STEP], std::make_integer_sequence<int, LANES>());
    transpose<STEP * 2>(x);
  }
}

inline float sum(Floats x) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += x[i];
  return total;
}

inline float greatest(Floats x) {
  float found = x[0];
  for (int i = 1; i < LANES; i++) found = std::max(found, x[i]);
  return found;
}

// e^x by 2^n e^r with |r| <= ln 2 / 2 and a polynomial of degree 6 (Cephes' expf); 0 below -87.3, where it would be
// subnormal.
inline Floats exponential(Floats x) {
  const Floats least = all(-87.3f);
  const Floats bounded = greater(x, least) < all(88.f) ? greater(x, least) : all(88.f);
  const Floats magic = all(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats shifted = bounded * 1.44269504f + magic;
  const Floats n = shifted - magic;
  Floats r = bounded - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Floats y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.f;
  const Ints power = ((Ints)shifted - (Ints)magic + 127) << 23;
  const Floats found = y * (Floats)power;
  return x > least ? found : Floats{};
}

inline Floats capped(Floats x, float cap) {
  const Floats limit = all(40.f);  // tanh is 1 from 10 on
  Floats y = x * (2.f / cap);
  y = y < limit ? y : limit;
  return cap - 2.f * cap / (exponential(y) + 1.f);
}

struct Call {
  int64_t rows, heads, kv_heads, columns, size, page, pages, kv_columns;
  int64_t query_row, query_head, query_column, table_row;  // strides
  const int32_t* page_table;
  float scale, cap;
  int window;
  float* weights;  // [R, ENDS, Hkv, n], see `tally`; null if they are not asked for
};

// A row's columns that are not dead.
struct Live {
  int64_t first, last;  // first .. last - 1
};

inline Live live_columns(const Call& call, int64_t row) {
  const int64_t start = call.page_table[row * call.table_row], end = call.page_table[row * call.table_row + 1];
  const int64_t first = std::clamp<int64_t>(-start, 0, call.columns);
  return {first, std::clamp<int64_t>(end - start, first, call.columns)};
}

// Columns first .. last - 1 of one row's queries, for the KV heads head .. head + heads - 1. limit: the KV columns that
// column last - 1 attends to.
struct Task {
  int row, head, heads, first, last, limit;
};

// A thread's memory. It grows to the largest size requested and is kept.
struct Scratch {
  std::vector<float> held;
  float* take(size_t floats) {
    if (held.size() < floats + 16) held.resize(floats + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(held.data()) + 63) / 64 * 64);
  }
};

template <typename T>
struct Attention {
  const Call& call;
  const int vectors = (call.size + LANES - 1) / LANES;
  const int padded = vectors * LANES;
  static constexpr int64_t LINE = 64 / sizeof(T);  // numbers of a cache line
  static constexpr int PAIR = 2, WIDE = LANES == 16 ? 2 : 1, MIXED = LANES == 16 ? 4 : 2;  // what fits registers

  // scores [BLOCK] of one query vector for the LANES columns at `columns`.
  template <typename K>
  void score(const float* query, const K* const* columns, float* scores) const {
    Floats x[LANES] = {};
    for (int i = 0; i < vectors; i++) {
      const Floats q = load(query + i * LANES);
#pragma GCC unroll 16
      for (int c = 0; c < LANES; c++) x[c] = q * load(columns[c] + i * LANES) + x[c];
    }
    store(scores, sums(x));
  }

  // The same sums in the same order, over transposed keys [padded, BLOCK]: for the lanes FIRST .. FIRST + N - 1 of PAIR
  // query vectors and WIDE vectors of columns.
  template <int FIRST, int N>
  inline __attribute__((always_inline)) void partial(const float* queries, const float* keys,
                                                     Floats (&x)[PAIR][WIDE]) const {
    if constexpr (N > 1) {
      Floats y[PAIR][WIDE];
      partial<FIRST, N / 2>(queries, keys, x);
      partial<FIRST + N / 2, N / 2>(queries, keys, y);
      for (int m = 0; m < PAIR; m++)
        for (int i = 0; i < WIDE; i++) x[m][i] += y[m][i];
    } else {
      for (int m = 0; m < PAIR; m++)
        for (int i = 0; i < WIDE; i++) x[m][i] = Floats{};
      for (int d = FIRST; d < padded; d += LANES)
        for (int m = 0; m < PAIR; m++)
          for (int i = 0; i < WIDE; i++)
            x[m][i] = all(queries[m * padded + d]) * load(keys + d * BLOCK + i * LANES) + x[m][i];
    }
  }

  void score_transposed(const float* queries, const float* keys, float* scores) const {
    Floats x[PAIR][WIDE];
    partial<0, LANES>(queries, keys, x);
    for (int m = 0; m < PAIR; m++)
      for (int i = 0; i < WIDE; i++) store(scores + m * BLOCK + i * LANES, x[m][i]);
  }

  template <typename K>
  void transpose_all(const K* const* columns, int first, int last, float* keys) const {
    for (int c = first; c < last; c += LANES)
      for (int i = 0; i < vectors; i++) {
        Floats x[LANES];
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) x[l] = load(columns[c + l] + i * LANES);
        transpose(x);
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) store(keys + (i * LANES + l) * BLOCK + c, x[l]);
      }
  }

  // mixed [COUNT, padded] = mixed * decay + weights [COUNT, BLOCK] @ the columns first .. last - 1, WIDE vectors of it.
  template <int COUNT, int W, typename V>
  static void mix(const float* weights, const float* decay, const V* const* columns, int first, int last, int padded,
                  int offset, float* mixed) {
    Floats x[COUNT][W];
    for (int m = 0; m < COUNT; m++)
      for (int i = 0; i < W; i++) x[m][i] = load(mixed + m * padded + offset + i * LANES) * decay[m];
    for (int c = first; c < last; c++) {
      Floats v[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) v[i] = load(columns[c] + offset + i * LANES);
#pragma GCC unroll 16
      for (int m = 0; m < COUNT; m++) {
        const Floats weight = all(weights[m * BLOCK + c]);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) x[m][i] = weight * v[i] + x[m][i];
      }
    }
    for (int m = 0; m < COUNT; m++)
      for (int i = 0; i < W; i++) store(mixed + m * padded + offset + i * LANES, x[m][i]);
  }

  template <int W, typename V>
  void mix_all(const float* weights, const float* decay, const V* const* columns, int first, int last, int offset,
               int count, float* mixed) const {
    int m = 0;
    for (; m + 4 <= count; m += 4)
      mix<4, W>(weights + m * BLOCK, decay + m, columns, first, last, padded, offset, mixed + m * padded);
    for (; m + 2 <= count; m += 2)
      mix<2, W>(weights + m * BLOCK, decay + m, columns, first, last, padded, offset, mixed + m * padded);
    for (; m < count; m++)
      mix<1, W>(weights + m * BLOCK, decay + m, columns, first, last, padded, offset, mixed + m * padded);
  }

  // Turns scores [BLOCK] of columns from `begin` on into weights. Returns the factor by which the sums so far decay.
  float weigh(float* scores, int begin, int attended_from, int attended_to, float& highest, Floats& total) const {
    Floats found = all(NOTHING);
    Floats x[BLOCK / LANES];
    Ints column;
    for (int l = 0; l < LANES; l++) column[l] = begin + l;
    for (int i = 0; i < BLOCK / LANES; i++, column += LANES) {
      x[i] = load(scores + i * LANES);
      if (call.cap > 0) x[i] = capped(x[i], call.cap);
      x[i] = ((column >= attended_from) & (column <= attended_to)) ? x[i] : all(NOTHING);
      found = greater(x[i], found);
    }
    const float before = highest;
    highest = std::max(before, greatest(found));
    if (highest == NOTHING) {
      std::fill(scores, scores + BLOCK, 0.f);
      return 1.f;
    }
    const float decay = before == highest ? 1.f : exponential(all(before - highest))[0];
    total *= decay;
    for (int i = 0; i < BLOCK / LANES; i++) {
      const Floats weight = exponential(x[i] - highest);
      total += weight;
      store(scores + i * LANES, weight);
    }
    return decay;
  }

  // Adds weights [BLOCK] of a query vector to its sums by page [n]. Each sum is relative to the highest score, `bases`
  // [n], when it was last added to.
  void tally(const float* weights, int begin, int first, int last, float highest, float* sums_by_page,
             float* bases) const {
    if (highest == NOTHING) return;
    for (int c = first; c < last;) {
      const int64_t page = (begin + c) / call.page;
      const int stop = std::min<int64_t>(last, (page + 1) * call.page - begin);
      Floats lanes{};
      for (; c + LANES <= stop; c += LANES) lanes += load(weights + c);
      float found = sum(lanes);
      for (; c < stop; c++) found += weights[c];
      sums_by_page[page] = sums_by_page[page] * std::exp(bases[page] - highest) + found;
      bases[page] = highest;
    }
  }

  template <typename K>
  void block(const K* const* keys, const K* const* values, const float* queries, float* scores,
             float* transposed, float* decay,
             float* mixed, float* highest, Floats* total, int count, int begin, int first, int last, int position,
             int width, const int* ends, float* sums_by_page) const {
    if (count >= MANY) {
      const int step = LANES * WIDE, from = first / step * step, to = (last + step - 1) / step * step;
      transpose_all(keys, from, to, transposed);
      for (int c = from; c < to; c += step)
        for (int m = 0; m < count; m += PAIR)
          score_transposed(queries + m * padded, transposed + c, scores + m * BLOCK + c);
    } else {
      for (int c = first / LANES * LANES; c < last; c += LANES)
        for (int m = 0; m < count; m++) score(queries + m * padded, keys + c, scores + m * BLOCK + c);
    }
    for (int m = 0; m < count; m++) {
      const int at = position + m % width;
      const int from = call.window > 0 ? std::max(0, at - call.window + 1) : 0;
      decay[m] = weigh(scores + m * BLOCK, begin, from, at, highest[m], total[m]);
      for (int e = 0; sums_by_page && e < ENDS; e++) {
        float* own = sums_by_page + (m / width * ENDS + e) * 2 * call.pages;
        if (m % width == ends[e]) tally(scores + m * BLOCK, begin, first, last, highest[m], own, own + call.pages);
      }
    }
    int i = 0;
    for (; i + MIXED <= vectors; i += MIXED)
      mix_all<MIXED>(scores, decay, values, first, last, i * LANES, count, mixed);
    for (; i < vectors; i++) mix_all<1>(scores, decay, values, first, last, i * LANES, count, mixed);
  }

  // Where a column of a row lies in the stores, for a KV head.
  int64_t place(const int32_t* row, int column, int head) const {
    return ((row[2 + column / call.page] * call.page + column % call.page) * call.kv_heads + head) * call.size;
  }

  // Reads the heads of a column. If columns are read in order, the processor reads ahead by itself.
  void touch(const T* from, int64_t heads) const {
    for (int64_t i = 0; i < heads * call.size; i += LINE) asm volatile("" ::"r"(*(const volatile char*)(from + i)));
  }

  // Begins to read them, while something else is computed. The processor drops such requests if they are many.
  void fetch(const T* from, int64_t heads) const {
    for (int64_t i = 0; i < heads * call.size; i += LINE) __builtin_prefetch(from + i, 0, 2);
  }

  void run(const Task& task, const T* query, const T* keys, const T* values, T* output) const {
    static thread_local Scratch scratch;
    const int group = call.heads / call.kv_heads, width = task.last - task.first, count = group * width;
    const int32_t* row = call.page_table + task.row * call.table_row;
    const int position = row[0] + task.first;
    const int held = (count + PAIR - 1) / PAIR * PAIR, rows = held * task.heads;
    float* queries = scratch.take(rows * (2 * padded + LANES + 1) + held * (BLOCK + 1) + 3 * BLOCK * padded);
    float* mixed = queries + rows * padded;
    Floats* total = reinterpret_cast<Floats*>(mixed + rows * padded);
    float* staged = reinterpret_cast<float*>(total + rows);
    float* transposed = staged + 2 * BLOCK * padded;
    float* scores = transposed + BLOCK * padded;
    float* highest = scores + held * BLOCK;
    float* decay = highest + rows;

    std::fill(queries, queries + 2 * rows * padded, 0.f);
    std::fill(scores, scores + held * BLOCK, 0.f);
    for (int h = 0; h < task.heads; h++) {
      for (int m = 0; m < count; m++) {
        const T* from = query + task.row * call.query_row + ((task.head + h) * group + m / width) * call.query_head +
                        (task.first + m % width) * call.query_column;
        for (int d = 0; d < call.size; d++)
          queries[(h * held + m) * padded + d] = static_cast<float>(from[d]) * call.scale;
        highest[h * held + m] = NOTHING;
        total[h * held + m] = Floats{};
      }
    }

    const Live live = live_columns(call, task.row);
    const int ends[ENDS] = {int(live.first) - task.first, int(live.last) - 1 - task.first};
    const bool tallies = call.weights && ((ends[0] >= 0 && ends[0] < width) || (ends[1] >= 0 && ends[1] < width));
    const int64_t tallied = tallies ? group * ENDS * 2 * call.pages : 0;  // of a KV head: sums and bases
    static thread_local std::vector<float> sums_by_page;
    sums_by_page.assign(task.heads * tallied, 0.f);
    for (int64_t i = call.pages; i < task.heads * tallied; i += 2 * call.pages)
      std::fill_n(sums_by_page.begin() + i, call.pages, NOTHING);

    // A block is copied as floats if it is used often or its columns are not whole vectors. The numbers stay the same.
    const bool whole = call.size == padded, stage = !whole || (!std::is_same_v<T, float> && count > 2);
    const bool ordered = task.heads >= ORDERED;
    const int ahead = ordered ? AHEAD : BLOCK;
    const int begin = call.window > 0 ? std::max(0, position - call.window + 1) : 0;
    for (int b = begin / BLOCK * BLOCK; b < task.limit; b += BLOCK) {
      const int first = std::max(begin - b, 0), last = std::min(BLOCK, task.limit - b);
      int64_t at[BLOCK];
      for (int c = 0; c < BLOCK; c++) at[c] = place(row, b + std::clamp(c, first, last - 1), task.head);
      for (int c = first; ordered && c < last; c++) {
        touch(keys + at[c], task.heads);
        touch(values + at[c], task.heads);
      }
      for (int h = 0; h < task.heads; h++) {
        const int next = b + BLOCK + ahead * h / task.heads, stop = b + BLOCK + ahead * (h + 1) / task.heads;
        for (int column = next; column < std::min(stop, task.limit); column++) {
          const int64_t from = place(row, column, task.head);
          fetch(keys + from, task.heads);
          fetch(values + from, task.heads);
        }
        const T *k[BLOCK], *v[BLOCK];
        for (int c = 0; c < BLOCK; c++) {
          k[c] = keys + at[c] + h * call.size;
          v[c] = values + at[c] + h * call.size;
        }
        const auto run_block = [&](const auto* const* ks, const auto* const* vs) {
          const int m = h * held;
          block(ks, vs, queries + m * padded, scores, transposed, decay, mixed + m * padded, highest + m, total + m,
                count, b, first, last, position, width, ends, tallies ? sums_by_page.data() + h * tallied : nullptr);
        };
        if (stage) {
          const float *staged_k[BLOCK], *staged_v[BLOCK];
          stage_block(k, v, first, last, whole, staged, staged_k, staged_v);
          run_block(staged_k, staged_v);
        } else {
          run_block(k, v);
        }
      }
    }

    for (int h = 0; tallies && h < task.heads; h++) {
      for (int m = 0; m < count; m++)
        for (int e = 0; e < ENDS; e++) {
          if (m % width != ends[e]) continue;
          const float* own = sums_by_page.data() + h * tallied + (m / width * ENDS + e) * 2 * call.pages;
          float* to = call.weights + ((task.row * ENDS + e) * call.kv_heads + task.head + h) * call.pages;
          const float share = 1.f / sum(total[h * held + m]);
          for (int64_t page = 0; page < call.pages; page++)
            if (own[page] > 0) to[page] += own[page] * std::exp(own[call.pages + page] - highest[h * held + m]) * share;
        }
    }
    for (int h = 0; h < task.heads; h++) {
      for (int m = 0; m < count; m++) {
        const int64_t column = task.row * call.columns + task.first + m % width;
        T* to = output + (column * call.heads + (task.head + h) * group + m / width) * call.size;
        const float share = 1.f / sum(total[h * held + m]);
        for (int d = 0; d < call.size; d++) to[d] = static_cast<T>(mixed[(h * held + m) * padded + d] * share);
      }
    }
  }

  // Copies the columns first .. last - 1 of a block as floats, in whole vectors.
  void stage_block(const T* const* k, const T* const* v, int first, int last, bool whole, float* staged,
                   const float** staged_k, const float** staged_v) const {
    for (int c = 0; c < BLOCK; c++) {
      const int at = std::clamp(c, first, last - 1);
      float* to = staged + 2 * at * padded;
      staged_k[c] = to;
      staged_v[c] = to + padded;
      if (c != at) continue;
      if (whole) {
        for (int i = 0; i < vectors; i++) {
          store(to + i * LANES, load(k[c] + i * LANES));
          store(to + padded + i * LANES, load(v[c] + i * LANES));
        }
      } else {
        std::fill(to, to + 2 * padded, 0.f);
        for (int d = 0; d < call.size; d++) to[d] = static_cast<float>(k[c][d]);
        for (int d = 0; d < call.size; d++) to[padded + d] = static_cast<float>(v[c][d]);
      }
    }
  }
};

// Writes zeros for dead columns. Returns the tasks of all other columns, the longest first.
template <typename T>
std::vector<Task> plan(const Call& call, T* output, int64_t& products) {
  std::vector<Task> tasks;
  const int group = call.heads / call.kv_heads, run = std::max(1, TILE / group);
  const int64_t column = call.heads * call.size;
  const int64_t fair = call.rows * call.kv_heads / (TASKS * torch::stable::get_num_threads());
  const int64_t vectors = group * std::clamp<int64_t>(call.columns, 1, run);  // of a tile
  const int64_t together = std::max<int64_t>(1, std::min(fair, SHARED / vectors));
  for (int64_t r = 0; r < call.rows; r++) {
    const int64_t start = call.page_table[r * call.table_row], end = call.page_table[r * call.table_row + 1];
    STD_TORCH_CHECK(end <= call.kv_columns, "row ", r, " ends at ", end, ", past the pages of its table");
    const auto [first, last] = live_columns(call, r);
    T* row = output + r * call.columns * column;
    std::fill(row, row + first * column, T(0));
    std::fill(row + last * column, row + call.columns * column, T(0));
    for (int64_t q = first; q < last; q += run) {
      const int64_t stop = std::min<int64_t>(q + run, last);
      for (int64_t h = 0; h < call.kv_heads; h += together) {
        const int64_t heads = std::min(together, call.kv_heads - h);
        tasks.push_back({int(r), int(h), int(heads), int(q), int(stop), int(start + stop)});
      }
      products += 2 * column * (stop - q) * (start + stop);
    }
  }
  const auto longer = [](const Task& a, const Task& b) {
    return int64_t(a.last - a.first) * a.heads * a.limit > int64_t(b.last - b.first) * b.heads * b.limit;
  };
  std::stable_sort(tasks.begin(), tasks.end(), longer);
  return tasks;
}

template <typename T>
void attend(const Call& call, const T* query, const T* keys, const T* values, T* output) {
  int64_t products = 0;
  const std::vector<Task> tasks = plan(call, output, products);
  const Attention<T> attention{call};
  std::atomic<size_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    for (size_t i = next++; i < tasks.size(); i = next++) attention.run(tasks[i], query, keys, values, output);
  };
  const int threads = torch::stable::get_num_threads();
  if (products < ALONE || threads == 1) {
    work(0, 1);
  } else {
    torch::stable::parallel_for(0, threads, 1, work);
  }
}

template <typename T>
void attend(const Call& call, const Tensor& query, const Tensor& keys, const Tensor& values, Tensor& output) {
  attend(call, static_cast<const T*>(query.const_data_ptr()), static_cast<const T*>(keys.const_data_ptr()),
         static_cast<const T*>(values.const_data_ptr()), static_cast<T*>(output.mutable_data_ptr()));
}

void check(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& page_table) {
  const ScalarType dtype = query.scalar_type();
  STD_TORCH_CHECK(query.dim() == 4 && keys.dim() == 4 && values.dim() == 4 && page_table.dim() == 4,
                  "query, keys, values and page_table have four dimensions");
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
                  "attention in place on a CPU takes float32 and bfloat16");
  STD_TORCH_CHECK(keys.scalar_type() == dtype && values.scalar_type() == dtype,
                  "query, keys and values differ in dtype");
  for (int i = 0; i < 4; i++) STD_TORCH_CHECK(keys.size(i) == values.size(i), "keys and values differ in shape");
  STD_TORCH_CHECK(keys.is_contiguous() && values.is_contiguous(), "keys and values are not contiguous");
  STD_TORCH_CHECK(page_table.scalar_type() == ScalarType::Int && page_table.stride(3) == 1 && page_table.size(3) >= 2 &&
                      page_table.size(0) == query.size(0),
                  "page_table is not int32 [R, 1, 1, 2 + n] with one row for each of the query's");
  STD_TORCH_CHECK(query.size(3) == keys.size(3) && query.stride(3) == 1 && query.size(1) % keys.size(2) == 0,
                  "the query's heads do not fit those of the keys");
}

Tensor run(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& page_table, double scale,
           int64_t window, double softcap, float* weights) {
  check(query, keys, values, page_table);
  Call call{};
  call.weights = weights;
  call.rows = query.size(0), call.heads = query.size(1), call.columns = query.size(2), call.size = query.size(3);
  call.page = keys.size(1), call.kv_heads = keys.size(2);
  call.pages = page_table.size(3) - 2, call.kv_columns = call.pages * call.page;
  call.query_row = query.stride(0), call.query_head = query.stride(1), call.query_column = query.stride(2);
  call.page_table = static_cast<const int32_t*>(page_table.const_data_ptr()), call.table_row = page_table.stride(0);
  call.scale = float(scale), call.cap = float(softcap);
  call.window = int(std::clamp<int64_t>(window, 0, std::numeric_limits<int>::max()));
  Tensor output = torch::stable::new_empty(query, {call.rows, call.columns, call.heads, call.size});
  if (query.scalar_type() == ScalarType::Float) {
    attend<float>(call, query, keys, values, output);
  } else {
    attend<BFloat16>(call, query, keys, values, output);
  }
  return output;
}

Tensor attend_in_place(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& page_table,
                       double scale, int64_t window, double softcap) {
  return run(query, keys, values, page_table, scale, window, softcap, nullptr);
}

std::tuple<Tensor, Tensor> weigh_in_place(const Tensor& query, const Tensor& keys, const Tensor& values,
                                          const Tensor& page_table, double scale, int64_t window, double softcap) {
  const int64_t rows = query.size(0), heads = keys.size(2), pages = page_table.size(3) - 2;
  std::vector<float> by_head(rows * ENDS * heads * pages, 0.f);
  Tensor output = run(query, keys, values, page_table, scale, window, softcap, by_head.data());
  Tensor weights = torch::stable::new_empty(query, {rows, pages}, ScalarType::Float);
  float* to = static_cast<float*>(weights.mutable_data_ptr());
  std::fill_n(to, rows * pages, 0.f);
  const int64_t size = keys.size(1), columns = query.size(2);
  const int32_t* table = static_cast<const int32_t*>(page_table.const_data_ptr());
  for (int64_t r = 0; r < rows; r++) {
    const int64_t reach = table[r * page_table.stride(0)] + columns;  // no column sees more
    const int64_t seen = std::clamp<int64_t>((reach + size - 1) / size, 0, pages);
    for (int64_t i = 0; i < ENDS * heads; i++) {
      const float* from = by_head.data() + (r * ENDS * heads + i) * pages;
      for (int64_t page = 0; page < seen; page++) to[r * pages + page] += from[page];
    }
  }
  return {output, weights};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exspec, CPU, library) {
  library.impl("attend_in_place", TORCH_BOX(&attend_in_place));
  library.impl("weigh_in_place", TORCH_BOX(&weigh_in_place));
}
