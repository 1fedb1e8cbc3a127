// Matrix products with constant weights in panels, in float32, on a CPU. packed.py describes the operators.
//
// A weight [out, in] is stored as [panels, in, PANEL]: the weights of PANEL outputs lie side by side for each input, so
// a product reads memory once and in order. A tile of up to MOST rows by PANEL outputs stays in registers. Each output
// is one sum in the order of the inputs, so no bit of a row depends on the other rows or on their number.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#if defined(__AVX512F__)
constexpr int LANES = 16, MOST = 12;
#elif defined(__AVX__)
constexpr int LANES = 8, MOST = 6;
#else
constexpr int LANES = 4, MOST = 6;
#endif
constexpr int WIDE = 2;  // vectors of a panel
constexpr int PANEL = WIDE * LANES;
constexpr int ROWS = 8 * MOST;          // rows that a thread computes at once
constexpr int64_t ALONE = 1 << 15;      // with fewer multiplications than this, other threads are not worth waking

typedef float Floats __attribute__((vector_size(LANES * 4)));

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

struct Call {
  int64_t rows, depth, width, row, column;  // row, column: strides of x
  const float *x, *weight, *bias;
  float* output;
};

template <int COUNT>
void tile(const Call& call, int64_t first, int64_t panel) {
  const float* x = call.x + first * call.row;
  const float* weight = call.weight + panel * call.depth * PANEL;
  Floats sums[COUNT][WIDE];
  for (int m = 0; m < COUNT; m++)
    for (int i = 0; i < WIDE; i++) sums[m][i] = Floats{};
  for (int64_t k = 0; k < call.depth; k++, x += call.column, weight += PANEL) {
    Floats w[WIDE];
#pragma GCC unroll 16
    for (int i = 0; i < WIDE; i++) w[i] = load(weight + i * LANES);
#pragma GCC unroll 16
    for (int m = 0; m < COUNT; m++)
#pragma GCC unroll 16
      for (int i = 0; i < WIDE; i++) sums[m][i] = x[m * call.row] * w[i] + sums[m][i];
  }
  const int64_t begin = panel * PANEL, outputs = std::min<int64_t>(PANEL, call.width - begin);
  for (int m = 0; m < COUNT; m++) {
    float found[PANEL];
    for (int i = 0; i < WIDE; i++) store(found + i * LANES, sums[m][i]);
    float* to = call.output + (first + m) * call.width + begin;
    for (int64_t n = 0; n < outputs; n++) to[n] = call.bias ? found[n] + call.bias[begin + n] : found[n];
  }
}

template <int COUNT = MOST>
void tile_of(int64_t count, const Call& call, int64_t first, int64_t panel) {
  if constexpr (COUNT > 0) {
    if (count == COUNT)
      tile<COUNT>(call, first, panel);
    else
      tile_of<COUNT - 1>(count, call, first, panel);
  }
}

void multiply(const Call& call) {
  const int64_t panels = (call.width + PANEL - 1) / PANEL, groups = (call.rows + ROWS - 1) / ROWS;
  const auto work = [&](int64_t from, int64_t to) {
    for (int64_t task = from; task < to; task++) {
      int64_t first = task % groups * ROWS;
      const int64_t last = std::min(call.rows, first + ROWS);
      for (int64_t tiles = (last - first + MOST - 1) / MOST; tiles > 0; tiles--) {  // of nearly equal size
        const int64_t count = (last - first + tiles - 1) / tiles;
        tile_of(count, call, first, task / groups);
        first += count;
      }
    }
  };
  const int64_t tasks = panels * groups, threads = torch::stable::get_num_threads();
  if (threads == 1 || call.rows * call.depth * call.width < ALONE) {
    work(0, tasks);
  } else {
    torch::stable::parallel_for(0, tasks, (tasks + threads - 1) / threads, work);
  }
}

Tensor panels(const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == ScalarType::Float, "expected a float32 matrix");
  const int64_t width = weight.size(0), depth = weight.size(1), count = (width + PANEL - 1) / PANEL;
  Tensor packed = torch::stable::new_empty(weight, {count, depth, PANEL});
  const float* from = static_cast<const float*>(weight.const_data_ptr());
  float* to = static_cast<float*>(packed.mutable_data_ptr());
  if (width % PANEL) std::fill(to + (count - 1) * depth * PANEL, to + count * depth * PANEL, 0.f);
  for (int64_t n = 0; n < width; n++)
    for (int64_t k = 0; k < depth; k++)
      to[(n / PANEL * depth + k) * PANEL + n % PANEL] = from[n * weight.stride(0) + k * weight.stride(1)];
  return packed;
}

Tensor packed_product(const Tensor& x, const Tensor& weight, int64_t width, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::Float, "expected float32 rows");
  STD_TORCH_CHECK(weight.dim() == 3 && weight.is_contiguous() && weight.scalar_type() == ScalarType::Float &&
                      weight.size(0) == (width + PANEL - 1) / PANEL && weight.size(1) == x.size(1) &&
                      weight.size(2) == PANEL,
                  "the panels do not fit the rows");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == width && bias->is_contiguous() &&
                            bias->scalar_type() == ScalarType::Float),
                  "the bias does not fit the panels");
  Tensor output = torch::stable::new_empty(x, {x.size(0), width});
  multiply({x.size(0), x.size(1), width, x.stride(0), x.stride(1), static_cast<const float*>(x.const_data_ptr()),
            static_cast<const float*>(weight.const_data_ptr()),
            bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr,
            static_cast<float*>(output.mutable_data_ptr())});
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exspec, CPU, library) {
  library.impl("panels", TORCH_BOX(&panels));
  library.impl("packed_product", TORCH_BOX(&packed_product));
}
