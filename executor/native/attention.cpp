// Attention of a step, over keys and values that lie in blocks of a pool.
//
// The work comes as parts: some rows of the step's queries against some runs of neighbouring slots. What several
// decoding sequences share is one part with all their rows; what is a sequence's own, or a long run, may be several. The
// rows of a prompt are parts of some neighbours each, every one of which reads one key more than the last. A part is
// an online softmax over blocks of keys (Milakov and Gimelshein, 2018): scores and output are two small matrix products
// around it, for one head of keys and all the queries that read it. The parts of a row are joined in the end, each
// weighted by the power of its maximum, as FlashDecoding does. How the work is cut depends on the parts alone,
// never on the number of threads, so neither do the results.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

namespace {

using Vec = at::vec::Vectorized<float>;

constexpr int64_t kLanes = Vec::size();
constexpr int64_t kColumns = kLanes >= 16 ? 4 : 2;  // vectors of a tile: AVX-512 has 32 registers, others half of that
constexpr int64_t kRows = kLanes >= 16 ? 6 : 4;     // queries of a tile
constexpr int64_t kBlock = 128;                     // keys between two looks at the maximum
constexpr int64_t kFew = 12;                        // queries up to which moving the keys costs more than it saves
constexpr int64_t kLine = 16;                       // floats of a cache line
constexpr int64_t kJoined = 32;                     // rows whose parts a thread joins at least
constexpr double kLog2E = 1.4426950408889634;       // e^x is 2^(x * this)
constexpr float kNothing = -std::numeric_limits<float>::infinity();

static_assert(kBlock % (kLanes * kColumns) == 0);

inline float sum_of(const Vec& lanes) {
  return at::vec::vec_reduce_all<float>([](Vec x, Vec y) { return x + y; }, lanes);
}

// What becomes of what the result of a product held.
enum class Onto { kNothing, kSum };

// c[Rows, Columns * kLanes] = a[Rows, depth] b[depth, Columns * kLanes], or added to what c holds.
template <Onto onto, int64_t Rows, int64_t Columns>
inline void multiply_tile(
    int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) {
  std::array<std::array<Vec, Columns>, Rows> sums;
  for (int64_t i = 0; i < Rows; ++i)
    for (int64_t j = 0; j < Columns; ++j)
      sums[i][j] = onto == Onto::kSum ? Vec::loadu(c + i * ldc + j * kLanes) : Vec(0.0f);
  for (int64_t k = 0; k < depth; ++k) {
    std::array<Vec, Columns> row;
    for (int64_t j = 0; j < Columns; ++j) row[j] = Vec::loadu(b + k * ldb + j * kLanes);
    for (int64_t i = 0; i < Rows; ++i) {
      const Vec factor(a[i * lda + k]);
      for (int64_t j = 0; j < Columns; ++j) sums[i][j] = at::vec::fmadd(factor, row[j], sums[i][j]);
    }
  }
  for (int64_t i = 0; i < Rows; ++i)
    for (int64_t j = 0; j < Columns; ++j) sums[i][j].store(c + i * ldc + j * kLanes);
}

template <Onto onto, int64_t Rows>
inline void multiply_rows(
    int64_t columns, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) {
  int64_t j = 0;
  for (; j + kColumns * kLanes <= columns; j += kColumns * kLanes)
    multiply_tile<onto, Rows, kColumns>(depth, a, lda, b + j, ldb, c + j, ldc);
  for (; j < columns; j += kLanes) multiply_tile<onto, Rows, 1>(depth, a, lda, b + j, ldb, c + j, ldc);
}

// c[rows, columns] = a[rows, depth] b[depth, columns], or added to c; columns is a multiple of kLanes.
template <Onto onto>
void multiply(
    int64_t rows, int64_t columns, int64_t depth,
    const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) {
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows)
    multiply_rows<onto, kRows>(columns, depth, a + i * lda, lda, b, ldb, c + i * ldc, ldc);
  a += i * lda;
  c += i * ldc;
  switch (rows - i) {
    case 5: multiply_rows<onto, 5>(columns, depth, a, lda, b, ldb, c, ldc); break;
    case 4: multiply_rows<onto, 4>(columns, depth, a, lda, b, ldb, c, ldc); break;
    case 3: multiply_rows<onto, 3>(columns, depth, a, lda, b, ldb, c, ldc); break;
    case 2: multiply_rows<onto, 2>(columns, depth, a, lda, b, ldb, c, ldc); break;
    case 1: multiply_rows<onto, 1>(columns, depth, a, lda, b, ldb, c, ldc); break;
    default: break;
  }
}

// The step as its tensors give it.
struct Step {
  const float* query;  // [heads, tokens, dim], strides below
  int64_t query_head, query_token;
  const float* keys;  // [slots, kv_heads, dim], contiguous; values alike
  const float* values;
  int64_t kv_heads, group, dim;
  float scale;  // of scores, whose powers of two are the shares
};

// What a thread needs besides, kept from call to call.
struct Scratch {
  std::vector<float> query, scores, keys, transposed, values;

  void fit(int64_t queries, int64_t dim) {
    query.resize(std::max<size_t>(query.size(), queries * dim));
    scores.resize(std::max<size_t>(scores.size(), queries * kBlock));
    for (std::vector<float>* each : {&keys, &transposed, &values})
      each->resize(std::max<size_t>(each->size(), dim * kBlock));
  }
};

// Where the result of a part for one head of keys goes: for each query its maximum, sum of exponentials, and output.
struct Partial {
  float* maximum;
  float* sum;
  float* output;  // [queries, dim]
};

// Walks over runs of [first slot, slots], some neighbours at a time.
struct Walk {
  at::ArrayRef<int64_t> runs;
  size_t run = 0;
  int64_t begin = 0;  // slots of the run that are behind

  bool ended() const { return run == runs.size(); }
  int64_t slot() const { return runs[run] + begin; }
  int64_t neighbours(int64_t most) const { return std::min(most, runs[run + 1] - begin); }
  void advance(int64_t slots) {
    begin += slots;
    if (begin < runs[run + 1]) return;
    run += 2;
    begin = 0;
  }
};

// Copies rows of a pool's head to where they lie in a row: as many as the walk still has, at most kBlock.
int64_t gather(Walk& walk, const float* pool, int64_t stride, int64_t dim, float* to) {
  int64_t count = 0;
  while (count < kBlock && !walk.ended()) {
    const float* from = pool + walk.slot() * stride;
    const int64_t now = walk.neighbours(kBlock - count);
    for (int64_t k = 0; k < now; ++k)
      for (int64_t d = 0; d < dim; d += kLanes) Vec::loadu(from + k * stride + d).store(to + (count + k) * dim + d);
    walk.advance(now);
    count += now;
  }
  return count;
}

// to[dim, kBlock] = the transpose of keys[count, dim]; count is a multiple of kLanes.
void transpose(const float* keys, int64_t count, int64_t dim, float* to) {
  for (int64_t k = 0; k < count; k += kLanes)
    for (int64_t d = 0; d < dim; d += kLanes)
      at::vec::transpose_mxn<float, kLanes, kLanes>(keys + k * dim + d, dim, to + d * kBlock + k, kBlock);
}

// 2^x for x of zero or less, of a relative error of some 2e-7; below -126 next to nothing. What is no number stays none.
inline Vec power_of_two(const Vec& x) {
  const Vec rounding(12582912.0f);  // 1.5 * 2^23: in a sum with it the lowest bits are the nearest whole number
  const Vec bounded = at::vec::clamp_min(x, Vec(-126.0f));
  const Vec sum = bounded + rounding;
  const Vec rest = bounded - (sum - rounding);  // -0.5 to 0.5, where this polynomial is 2^rest (minimax)
  Vec share(0.00132647271f);
  for (const float factor : {0.00967151265f, 0.0555073374f, 0.240222421f, 0.693146978f, 1.0f})
    share = at::vec::fmadd(share, rest, Vec(factor));
  const auto exponent = at::vec::cast<int32_t, float>(sum) << at::vec::Vectorized<int32_t>(23);
  return at::vec::cast<float, int32_t>(at::vec::cast<int32_t, float>(share) + exponent);
}

// The larger ones of two vectors. One that is no number may be lost, but not in the exponentials.
inline Vec larger(const Vec& x, const Vec& y) { return at::vec::clamp_min(x, y); }

// Turns the first `count` scores of a row into exponentials, those behind them, up to `all`, into zeros, and rescales
// what the row had so far.
inline void exponentiate(
    float* scores, int64_t count, int64_t all, float& maximum, float& sum, float* output, int64_t dim) {
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  std::fill(scores + count, scores + padded, kNothing);
  Vec largest = Vec::loadu(scores);
  for (int64_t k = kLanes; k < padded; k += kLanes) largest = larger(largest, Vec::loadu(scores + k));
  const float seen = at::vec::vec_reduce_all<float>([](Vec x, Vec y) { return larger(x, y); }, largest);
  if (!(seen <= maximum)) {  // a score that is no number must spread
    const float faded = std::exp2(maximum - seen);
    sum *= faded;
    for (int64_t d = 0; d < dim; d += kLanes) (Vec::loadu(output + d) * Vec(faded)).store(output + d);
    maximum = seen;
  }
  Vec total(0.0f);
  for (int64_t k = 0; k < padded; k += kLanes) {
    const Vec share = power_of_two(Vec::loadu(scores + k) - Vec(maximum));
    share.store(scores + k);
    total = total + share;
  }
  sum += sum_of(total);
  if (padded < all) std::fill(scores + padded, scores + all, 0.0f);
}

template <int64_t Rows>
inline void dot_rows(
    const float* query, const float* keys, int64_t stride, int64_t count, int64_t dim, float* scores) {
  for (int64_t k = 0; k < count; ++k) {
    std::array<Vec, Rows> sums;
    sums.fill(Vec(0.0f));
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Vec key = Vec::loadu(keys + k * stride + d);
      for (int64_t i = 0; i < Rows; ++i) sums[i] = at::vec::fmadd(key, Vec::loadu(query + i * dim + d), sums[i]);
    }
    for (int64_t i = 0; i < Rows; ++i) scores[i * kBlock + k] = sum_of(sums[i]);
  }
}

// scores[queries, kBlock] of `count` keys, for few queries: one key after the other, as it lies.
void score_few(
    int64_t queries, const float* query, const float* keys, int64_t stride, int64_t count, int64_t dim, float* scores) {
  int64_t i = 0;
  for (; i + kRows <= queries; i += kRows)
    dot_rows<kRows>(query + i * dim, keys, stride, count, dim, scores + i * kBlock);
  query += i * dim;
  scores += i * kBlock;
  switch (queries - i) {
    case 5: dot_rows<5>(query, keys, stride, count, dim, scores); break;
    case 4: dot_rows<4>(query, keys, stride, count, dim, scores); break;
    case 3: dot_rows<3>(query, keys, stride, count, dim, scores); break;
    case 2: dot_rows<2>(query, keys, stride, count, dim, scores); break;
    case 1: dot_rows<1>(query, keys, stride, count, dim, scores); break;
    default: break;
  }
}

// The same for many queries: a matrix product with the transpose of keys[kBlock, dim].
void score_many(
    int64_t queries, const float* query, float* keys, int64_t count, int64_t dim, float* transposed, float* scores) {
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  std::fill(keys + count * dim, keys + padded * dim, 0.0f);
  transpose(keys, padded, dim, transposed);
  multiply<Onto::kNothing>(queries, padded, dim, query, dim, transposed, kBlock, scores, kBlock);
}

// Asks for rows that are needed soon: a head's rows lie apart, and what the CPU guesses by itself is too little.
inline void prefetch(const float* rows, int64_t stride, int64_t count, int64_t dim) {
  for (int64_t k = 0; k < count; ++k)
    for (int64_t d = 0; d < dim; d += kLine) __builtin_prefetch(rows + k * stride + d);
}

// One part for one head of keys: `rows` of the queries against `runs` of [first slot, slots], of whose keys the first
// row reads `reads`, and each row behind it one more, up to all. Few queries read keys and values where they lie; for
// many these are gathered, so that short runs make as large products as long ones.
void attend_part(
    const Step& step, int64_t kv_head, at::ArrayRef<int64_t> rows, at::ArrayRef<int64_t> runs, int64_t reads,
    Scratch& scratch, const Partial& partial) {
  const int64_t dim = step.dim, group = step.group, queries = static_cast<int64_t>(rows.size()) * group;
  const int64_t stride = step.kv_heads * dim;
  scratch.fit(queries, dim);
  float* query = scratch.query.data();
  for (size_t i = 0; i < rows.size(); ++i)
    for (int64_t g = 0; g < group; ++g) {
      const float* from = step.query + (kv_head * group + g) * step.query_head + rows[i] * step.query_token;
      float* to = query + (static_cast<int64_t>(i) * group + g) * dim;
      for (int64_t d = 0; d < dim; ++d) to[d] = from[d] * step.scale;
    }
  std::fill(partial.maximum, partial.maximum + queries, kNothing);
  std::fill(partial.sum, partial.sum + queries, 0.0f);
  std::fill(partial.output, partial.output + queries * dim, 0.0f);

  const bool few = queries <= kFew;
  const float* keys = step.keys + kv_head * dim;
  const float* values = step.values + kv_head * dim;
  int64_t before = 0, count = 0;  // keys of the part before those in hand, and how many these are
  for (Walk walk{runs}; !walk.ended(); before += count) {
    const float* block = scratch.values.data();  // the values in hand
    int64_t apart = dim;                         // floats from one of them to the next
    Walk behind = walk;
    if (few) {
      count = walk.neighbours(kBlock);
      behind.advance(count);
    } else {
      count = gather(behind, keys, stride, dim, scratch.keys.data());
    }
    const int64_t first = std::max<int64_t>(0, before - reads + 1) * group;  // queries before it read none of these
    if (first < queries) {
      float* scores = scratch.scores.data() + first * kBlock;
      if (few) {
        block = values + walk.slot() * stride;
        apart = stride;
        prefetch(block, stride, count, dim);
        if (!behind.ended()) prefetch(keys + behind.slot() * stride, stride, behind.neighbours(kBlock), dim);
        score_few(queries - first, query + first * dim, keys + walk.slot() * stride, stride, count, dim, scores);
      } else {
        gather(walk, values, stride, dim, scratch.values.data());
        score_many(
            queries - first, query + first * dim, scratch.keys.data(), count, dim, scratch.transposed.data(), scores);
      }
      for (int64_t q = first; q < queries; ++q)
        exponentiate(
            scores + (q - first) * kBlock, std::min(count, reads + q / group - before), count, partial.maximum[q],
            partial.sum[q], partial.output + q * dim, dim);
      multiply<Onto::kSum>(
          queries - first, dim, count, scores, kBlock, block, apart, partial.output + first * dim, dim);
    }
    walk = behind;
  }
}

// Which rows and runs each part has, as the tensors say it.
struct Parts {
  at::ArrayRef<int64_t> rows, row_starts, runs, run_starts, reads;

  int64_t size() const { return static_cast<int64_t>(row_starts.size()) - 1; }
  int64_t first_row(int64_t part) const { return row_starts[part]; }
  int64_t rows_in(int64_t part) const { return row_starts[part + 1] - row_starts[part]; }
  at::ArrayRef<int64_t> rows_of(int64_t part) const { return rows.slice(first_row(part), rows_in(part)); }
  at::ArrayRef<int64_t> runs_of(int64_t part) const {
    return runs.slice(2 * run_starts[part], 2 * (run_starts[part + 1] - run_starts[part]));
  }
};

// Joins the parts of each row. A part's results lie together for each head of keys: [part][kv_head][row][group].
void join(const Step& step, const Parts& parts, int64_t tokens, const Partial& results, float* output) {
  const int64_t heads = step.kv_heads * step.group, dim = step.dim;
  std::vector<int64_t> last(tokens, -1), before(parts.rows.size()), part_of(parts.rows.size());
  for (int64_t part = 0; part < parts.size(); ++part)
    for (int64_t entry = parts.first_row(part); entry < parts.row_starts[part + 1]; ++entry) {
      part_of[entry] = part;
      before[entry] = last[parts.rows[entry]];
      last[parts.rows[entry]] = entry;
    }
  at::parallel_for(0, tokens, kJoined, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (last[row] < 0) continue;
      for (int64_t head = 0; head < heads; ++head) {
        const auto place = [&](int64_t entry) {
          const int64_t part = part_of[entry], first = parts.first_row(part);
          return first * heads + head / step.group * parts.rows_in(part) * step.group + (entry - first) * step.group +
              head % step.group;
        };
        float largest = kNothing, total = 0.0f;
        for (int64_t e = last[row]; e >= 0; e = before[e]) largest = std::max(largest, results.maximum[place(e)]);
        float* to = output + (row * heads + head) * dim;
        std::fill(to, to + dim, 0.0f);
        for (int64_t e = last[row]; e >= 0; e = before[e]) {
          const int64_t at = place(e);
          const float weight = std::exp2(results.maximum[at] - largest);
          total += weight * results.sum[at];
          for (int64_t d = 0; d < dim; ++d) to[d] += weight * results.output[at * dim + d];
        }
        for (int64_t d = 0; d < dim; ++d) to[d] /= total;
      }
    }
  });
}

at::ArrayRef<int64_t> numbers(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kLong && tensor.is_contiguous() && tensor.is_cpu(), name, " are no int64");
  return {tensor.const_data_ptr<int64_t>(), static_cast<size_t>(tensor.numel())};
}

// Everything that becomes an address is looked at first.
void check(const Parts& parts, int64_t tokens, int64_t slots) {
  const auto ascend = [](at::ArrayRef<int64_t> starts, size_t end) {
    return !starts.empty() && starts.front() == 0 && starts.back() == static_cast<int64_t>(end) &&
        std::is_sorted(starts.begin(), starts.end());
  };
  TORCH_CHECK(ascend(parts.row_starts, parts.rows.size()), "row_starts do not fit rows");
  TORCH_CHECK(ascend(parts.run_starts, parts.runs.size() / 2) && parts.runs.size() % 2 == 0, "run_starts do not fit");
  TORCH_CHECK(
      parts.row_starts.size() == parts.run_starts.size() && parts.row_starts.size() == parts.reads.size() + 1,
      "row_starts, run_starts and reads differ in length");
  for (const int64_t reads : parts.reads) TORCH_CHECK(reads >= -slots && reads <= slots, "no number of keys: ", reads);
  for (const int64_t row : parts.rows) TORCH_CHECK(row >= 0 && row < tokens, "a row that is none: ", row);
  for (size_t i = 0; i < parts.runs.size(); i += 2)
    TORCH_CHECK(
        parts.runs[i] >= 0 && parts.runs[i] < slots && parts.runs[i + 1] > 0 && parts.runs[i + 1] <= slots - parts.runs[i],
        "a run outside the pool: ", parts.runs[i], ", ", parts.runs[i + 1]);
}

// query [heads, tokens, dim], keys and values [slots, kv_heads, dim], output [tokens, heads, dim], all float32.
// Part p has the queries rows[row_starts[p] : row_starts[p + 1]] and the runs[run_starts[p] : run_starts[p + 1]], each
// of which is [first slot, slots]. Its first row reads the first reads[p] of these keys, the next row one more, up to
// all; below zero it is a later row that reads the first one. Writes the rows of output that some part has, and no other.
void attend(
    const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& rows,
    const at::Tensor& row_starts, const at::Tensor& runs, const at::Tensor& run_starts, const at::Tensor& reads,
    double scale, at::Tensor& output) {
  for (const at::Tensor& each : {query, keys, values, output})
    TORCH_CHECK(each.scalar_type() == at::kFloat && each.is_cpu() && each.dim() == 3, "tensors must be float32, of three");
  const int64_t heads = query.size(0), tokens = query.size(1), dim = query.size(2), kv_heads = keys.size(1);
  TORCH_CHECK(
      keys.is_contiguous() && values.is_contiguous() && output.is_contiguous() && query.stride(2) == 1 &&
          keys.sizes() == values.sizes() && keys.size(2) == dim && kv_heads > 0 && heads % kv_heads == 0 &&
          dim > 0 && dim % kLanes == 0 && output.sizes() == at::IntArrayRef({tokens, heads, dim}),
      "shapes do not fit together");
  const Parts parts{
      numbers(rows, "rows"), numbers(row_starts, "row_starts"), numbers(runs, "runs"),
      numbers(run_starts, "run_starts"), numbers(reads, "reads")};
  check(parts, tokens, keys.size(0));

  const Step step{
      query.const_data_ptr<float>(), query.stride(0), query.stride(1), keys.const_data_ptr<float>(),
      values.const_data_ptr<float>(), kv_heads, heads / kv_heads, dim,
      static_cast<float>(scale * kLog2E)};
  static thread_local std::vector<float> memory;  // kept from call to call, as all scratch is: new pages cost more
  const size_t queries = parts.rows.size() * heads;
  memory.resize(std::max(memory.size(), queries * (dim + 2)));
  const Partial results{memory.data(), memory.data() + queries, memory.data() + 2 * queries};

  // Threads take the next task when they are done with one: tasks differ in size, and other programs take CPUs away.
  std::atomic<int64_t> next{0};
  const int64_t tasks = parts.size() * kv_heads;
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), tasks), 1, [&](int64_t, int64_t) {
    static thread_local Scratch scratch;
    for (int64_t task = next++; task < tasks; task = next++) {
      const int64_t part = task / kv_heads, kv_head = task % kv_heads;
      const int64_t at = parts.first_row(part) * heads + kv_head * parts.rows_in(part) * step.group;
      attend_part(
          step, kv_head, parts.rows_of(part), parts.runs_of(part), parts.reads[part], scratch,
          {results.maximum + at, results.sum + at, results.output + at * dim});
    }
  });
  join(step, parts, tokens, results, output.mutable_data_ptr<float>());
}

}  // namespace

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def(
      "attend(Tensor query, Tensor keys, Tensor values, Tensor rows, Tensor row_starts, Tensor runs,"
      " Tensor run_starts, Tensor reads, float scale, Tensor(a!) output) -> ()",
      &attend);
}
