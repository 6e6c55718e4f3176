// Linears of many rows on the tiles of AMX, as exact as single precision.
//
// AMX multiplies bfloat16 and adds up in float32, sixteen times as fast as vectors do in float32. A weight that half
// precision holds has 11 significant bits, so it is the sum of two bfloat16, which have 8 each; an input, with 24, is the
// sum of three. Their product is the sum of six products, of which the one of the smallest parts is less than float32
// keeps and is left out. The five are added up in one float32, in an order that depends on nothing but the shapes.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

namespace {

using Half = uint16_t;  // a bfloat16 as it lies in memory

constexpr int64_t kSide = 16;   // rows of a tile; float32 in one of them
constexpr int64_t kDepth = 32;  // bfloat16 in one of them
constexpr int64_t kTile = kSide * kDepth;
constexpr int64_t kVector = 16;
constexpr int64_t kInputParts = 3, kWeightParts = 2;
constexpr int64_t kTall = 2, kWide = 2;               // tiles of outputs that are worked on at once
constexpr int64_t kInputBytes = 1200 * 1024;          // of inputs that stay in a core's cache while weights come past
constexpr int64_t kRowBytes = kDepth * sizeof(Half);  // in memory, too: a tile lies there in one piece

// Parts of 16 numbers: the nearest bfloat16, then that of what is left, and so on, each `apart` behind the last.
inline void split(__m512 rest, int64_t parts, int64_t apart, Half* to) {
  for (int64_t part = 0; part < parts; ++part) {
    const __m256i nearest = (__m256i)_mm512_cvtneps_pbh(rest);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + part * apart), nearest);
    rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(nearest), 16)));
  }
}

// to[kInputParts][kSide][kDepth]: the parts of a tile of inputs, with zeros behind the last row.
void split_inputs(const float* from, int64_t stride, int64_t rows, Half* to) {
  for (int64_t row = 0; row < kSide; ++row)
    for (int64_t at = 0; at < kDepth; at += kVector)
      split(
          row < rows ? _mm512_loadu_ps(from + row * stride + at) : _mm512_setzero_ps(), kInputParts, kTile,
          to + row * kDepth + at);
}

// to[kWeightParts][kDepth / 2][kSide][2]: the parts of the weights of kSide outputs; AMX takes two of each at a time.
void split_weights(const float* from, int64_t stride, Half* to) {
  Half parts[kWeightParts][kDepth];
  for (int64_t output = 0; output < kSide; ++output) {
    for (int64_t at = 0; at < kDepth; at += kVector)
      split(_mm512_loadu_ps(from + output * stride + at), kWeightParts, kDepth, parts[0] + at);
    for (int64_t part = 0; part < kWeightParts; ++part)
      for (int64_t at = 0; at < kDepth; ++at)
        to[part * kTile + at / 2 * kDepth + output * 2 + at % 2] = parts[part][at];
  }
}

// Tile registers: 0 to 3 are outputs, row by row; 4 and 5 inputs; 6 and 7 weights. They are named by number alone.
struct alignas(64) Config {
  uint8_t palette = 1, start = 0, none[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};

  explicit Config(int64_t input_rows) {
    for (int tile = 0; tile < 8; ++tile) rows[tile] = tile < 6 ? input_rows : kSide;
  }
};

template <int64_t Tall>
inline void load_inputs(const Half* tile, int64_t below) {
  _tile_loadd(4, tile, kRowBytes);
  if constexpr (Tall > 1) _tile_loadd(5, tile + below, kRowBytes);
}

template <int64_t Wide>
inline void load_weights(const Half* tile, int64_t beside) {
  _tile_loadd(6, tile, kRowBytes);
  if constexpr (Wide > 1) _tile_loadd(7, tile + beside, kRowBytes);
}

template <int64_t Tall, int64_t Wide>
inline void add_products() {
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (Wide > 1) _tile_dpbf16ps(1, 4, 7);
  if constexpr (Tall > 1) _tile_dpbf16ps(2, 5, 6);
  if constexpr (Tall > 1 && Wide > 1) _tile_dpbf16ps(3, 5, 7);
}

struct Product {
  const Half* inputs;   // [row tiles][depth][kInputParts] tiles
  const Half* weights;  // [column tiles][depth][kWeightParts] tiles
  const float* bias;    // [columns] or nothing
  float* output;        // [rows, columns]
  int64_t rows, columns, depth;

  int64_t row_tiles() const { return (rows + kSide - 1) / kSide; }
  int64_t tile_rows() const { return std::min(rows, kSide); }
  int64_t inputs_below() const { return depth * kInputParts * kTile; }
  int64_t weights_beside() const { return depth * kWeightParts * kTile; }
};

// The first rows of a tile that hangs over the last row of the output.
void store_rest(const Product& product, const float* tile, int64_t row, int64_t column) {
  for (int64_t i = 0; i < product.rows - row; ++i)
    std::copy_n(tile + i * kSide, kSide, product.output + (row + i) * product.columns + column);
}

#define START(tile, column)                                              \
  if (product.bias) {                                                    \
    _tile_loadd(tile, product.bias + (column), 0); /* for every row */   \
  } else {                                                               \
    _tile_zero(tile);                                                    \
  }

#define STORE(tile, row, column)                                                            \
  if (product.rows - (row) >= product.tile_rows()) {                                        \
    float* to = product.output + (row) * product.columns + (column);                        \
    _tile_stored(tile, to, product.columns * sizeof(float));                                \
  } else {                                                                                  \
    alignas(64) float whole[kSide * kSide];                                                 \
    _tile_stored(tile, whole, kSide * sizeof(float));                                       \
    store_rest(product, whole, row, column);                                                \
  }

// Tall x Wide tiles of the output, from a tile of rows and a tile of columns on.
template <int64_t Tall, int64_t Wide>
void compute(const Product& product, int64_t row_tile, int64_t column_tile) {
  const int64_t below = product.inputs_below(), beside = product.weights_beside();
  const int64_t row = row_tile * kSide, column = column_tile * kSide;
  START(0, column);
  if constexpr (Wide > 1) START(1, column + kSide);
  if constexpr (Tall > 1) START(2, column);
  if constexpr (Tall > 1 && Wide > 1) START(3, column + kSide);

  const Half* inputs = product.inputs + row_tile * below;
  const Half* weights = product.weights + column_tile * beside;
  for (int64_t step = 0; step < product.depth; ++step) {
    load_weights<Wide>(weights, beside);
    for (int64_t part = kInputParts - 1; part >= 0; --part) {
      load_inputs<Tall>(inputs + part * kTile, below);
      add_products<Tall, Wide>();
    }
    load_weights<Wide>(weights + kTile, beside);
    add_products<Tall, Wide>();
    load_inputs<Tall>(inputs + kTile, below);
    add_products<Tall, Wide>();
    inputs += kInputParts * kTile;
    weights += kWeightParts * kTile;
  }

  STORE(0, row, column);
  if constexpr (Wide > 1) STORE(1, row, column + kSide);
  if constexpr (Tall > 1) STORE(2, row + kSide, column);
  if constexpr (Tall > 1 && Wide > 1) STORE(3, row + kSide, column + kSide);
}

// Threads take the next task when they are done with one: other programs take CPUs away.
template <typename Task>
void share_out(int64_t tasks, const Task& task) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), tasks), 1, [&](int64_t, int64_t) { task(next); });
}

void multiply_all(const Product& product) {
  const int64_t row_tiles = product.row_tiles(), column_tiles = product.columns / kSide;
  const int64_t fit = kInputBytes / (product.inputs_below() * static_cast<int64_t>(sizeof(Half)));
  const int64_t height = std::max(kTall, fit / kTall * kTall);
  const int64_t strips = (column_tiles + kWide - 1) / kWide;
  const int64_t tasks = (row_tiles + height - 1) / height * strips;
  share_out(tasks, [&](std::atomic<int64_t>& next) {
    const Config config(product.tile_rows());
    _tile_loadconfig(&config);
    for (int64_t task = next++; task < tasks; task = next++) {
      const int64_t first = task / strips * height, last = std::min(first + height, row_tiles);
      const int64_t column = task % strips * kWide;
      const bool is_wide = column + 1 < column_tiles;
      for (int64_t row = first; row < last; row += kTall) {
        const bool is_tall = row + 1 < last;
        if (is_tall && is_wide)
          compute<2, 2>(product, row, column);
        else if (is_tall)
          compute<2, 1>(product, row, column);
        else if (is_wide)
          compute<1, 2>(product, row, column);
        else
          compute<1, 1>(product, row, column);
      }
    }
    _tile_release();
  });
}

void require_floats(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(
      tensor.scalar_type() == at::kFloat && tensor.is_cpu() && tensor.is_contiguous(), name, " must be float32 in a row");
}

// weight [outputs, inputs] in float32, rounded to half precision; outputs a multiple of 16, inputs of 32. Returns its
// parts, in the order in which tiles take them.
at::Tensor pack(const at::Tensor& weight) {
  require_floats(weight, "weight");
  TORCH_CHECK(
      weight.dim() == 2 && weight.size(0) % kSide == 0 && weight.size(1) % kDepth == 0 && weight.numel() > 0,
      "a weight of that shape does not fit tiles");
  const int64_t columns = weight.size(0), inputs = weight.size(1), depth = inputs / kDepth;
  at::Tensor packed = at::empty({columns / kSide, depth, kWeightParts, kTile}, weight.options().dtype(at::kBFloat16));
  const float* from = weight.const_data_ptr<float>();
  Half* to = static_cast<Half*>(packed.mutable_data_ptr());
  for (int64_t column = 0; column < columns; column += kSide)
    for (int64_t step = 0; step < depth; ++step, to += kWeightParts * kTile)
      split_weights(from + column * inputs + step * kDepth, inputs, to);
  return packed;
}

// rows [..., inputs] by what `pack` returned, and a bias of [outputs] where there is one; returns [..., outputs].
at::Tensor multiply(const at::Tensor& rows, const at::Tensor& packed, const std::optional<at::Tensor>& bias) {
  require_floats(rows, "rows");
  TORCH_CHECK(
      packed.scalar_type() == at::kBFloat16 && packed.is_cpu() && packed.is_contiguous() && packed.dim() == 4 &&
          packed.size(2) == kWeightParts && packed.size(3) == kTile && rows.dim() > 0 && rows.numel() > 0 &&
          rows.size(-1) == packed.size(1) * kDepth,
      "rows and weight do not fit together");
  const int64_t columns = packed.size(0) * kSide, inputs = rows.size(-1), depth = packed.size(1);
  if (bias) {
    require_floats(*bias, "bias");
    TORCH_CHECK(bias->numel() == columns, "bias and weight do not fit together");
  }
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.back() = columns;
  at::Tensor output = at::empty(sizes, rows.options());
  const int64_t count = rows.numel() / inputs, row_tiles = (count + kSide - 1) / kSide;

  static thread_local std::vector<Half> memory;  // kept from call to call: new pages cost more than what is done there
  memory.resize(std::max<size_t>(memory.size(), row_tiles * depth * kInputParts * kTile + kTile));
  Half* parts = reinterpret_cast<Half*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  const float* from = rows.const_data_ptr<float>();
  share_out(row_tiles, [&](std::atomic<int64_t>& next) {
    for (int64_t tile = next++; tile < row_tiles; tile = next++)
      for (int64_t step = 0; step < depth; ++step)
        split_inputs(
            from + tile * kSide * inputs + step * kDepth, inputs, count - tile * kSide,
            parts + (tile * depth + step) * kInputParts * kTile);
  });
  multiply_all(
      {parts, static_cast<const Half*>(packed.const_data_ptr()), bias ? bias->const_data_ptr<float>() : nullptr,
       output.mutable_data_ptr<float>(), count, columns, depth});
  return output;
}

// Asks Linux for the tiles' registers, which a process has only when it asked. Returns whether it may use them.
bool may_use_tiles() {
  constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}

}  // namespace

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def("may_use_tiles() -> bool", &may_use_tiles);
  m.def("pack(Tensor weight) -> Tensor", &pack);
  m.def("multiply(Tensor rows, Tensor packed, Tensor? bias) -> Tensor", &multiply);
}
