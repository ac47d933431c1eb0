// SPDX-License-Identifier: GPL-2.0-or-later

#include "cell_list.h"

#include <algorithm>
#include <cmath>

#include <torch/torch.h>

namespace metatomic_tc::lammps {

/// Candidates that are looked at together; each takes about 150 bytes.
static constexpr int64_t max_candidates = int64_t{1} << 22;

/// Bins along one cell vector.
struct Axis {
  /// Number of bins, and how many away from its own an atom may have neighbors.
  int64_t count = 1;
  int64_t reach = 0;
};

/// The inverse of the cell, with unit vectors in place of the rows of non-periodic directions:
/// column k is normal to the other two rows, and x·(column k) counts cell vectors, or length.
static torch::Tensor inverse(const Cell &cell) {
  auto rows = torch::eye(3, torch::kFloat64);
  for (int k = 0; k < 3; k++)
    for (int m = 0; m < 3; m++)
      if (cell.periodic[k])
        rows[k][m] = cell.rows[k][m];
  return torch::linalg_inv(rows);
}

torch::Tensor cell_list(const torch::Tensor &positions, const Cell &cell, double cutoff) {
  const torch::NoGradGuard no_gradient;
  const auto device = positions.device();
  const auto integers = torch::TensorOptions(torch::kInt64).device(device);
  const auto rows =
      torch::from_blob(const_cast<double (*)[3]>(cell.rows), {3, 3}, torch::kFloat64).to(device);
  if (positions.size(0) == 0)
    return torch::empty({0, 5}, integers.dtype(torch::kInt32));

  // ---- bins, half a cutoff wide where the cell is not smaller than that

  const auto normals = inverse(cell);
  const auto coordinates = positions.matmul(normals.to(device));
  const auto low = std::get<0>(coordinates.min(0)).to(torch::kCPU);
  const auto high = std::get<0>(coordinates.max(0)).to(torch::kCPU);
  const auto lengths = torch::linalg_vector_norm(normals, 2, at::IntArrayRef({0}));
  Axis axes[3];
  double start[3], width[3];
  for (int k = 0; k < 3; k++) {
    const double extent = cell.periodic[k] ? 1.0 : (high[k] - low[k]).item<double>();
    // The distance between the faces of the cell, or the extent of the atoms.
    const double height = extent / lengths[k].item<double>();
    auto &axis = axes[k];
    axis.count = static_cast<int64_t>(std::clamp(2.0 * height / cutoff, 1.0, 1048576.0));
    if (cell.periodic[k] || axis.count > 1)
      axis.reach = static_cast<int64_t>(std::ceil(cutoff * axis.count / height));
    start[k] = cell.periodic[k] ? 0.0 : low[k].item<double>();
    width[k] = extent > 0.0 ? extent / axis.count : 1.0;
  }
  const auto counts =
      torch::tensor({axes[0].count, axes[1].count, axes[2].count}, torch::kInt64).to(device);
  const auto periodic = torch::from_blob(const_cast<bool *>(cell.periodic), {3}, torch::kBool);
  const auto vector = [&](double *numbers) {
    return torch::from_blob(numbers, {3}, torch::kFloat64).to(device);
  };

  auto bins = ((coordinates - vector(start)) / vector(width)).floor().to(torch::kInt64);
  // Atoms outside of the cell are looked at where their image inside is; those at the far end of a
  // non-periodic direction belong to the last bin.
  const auto outside = torch::floor_divide(bins, counts) * periodic.to(device);
  bins = torch::minimum(bins - outside * counts, counts - 1);
  const auto inside = positions - outside.to(torch::kFloat64).matmul(rows);

  const auto key_of = [&](const torch::Tensor &bin) {
    return (bin.select(-1, 2) * axes[1].count + bin.select(-1, 1)) * axes[0].count +
           bin.select(-1, 0);
  };
  const auto [sorted_keys, order] = torch::sort(key_of(bins), /*stable=*/true, 0, false);
  const auto [keys, inverse_index, sizes] =
      torch::unique_consecutive(sorted_keys, false, /*return_counts=*/true);
  const auto ends = sizes.cumsum(0);
  const auto starts = ends - sizes;
  const auto sorted = inside.index_select(0, order);
  const auto occupied = bins.index_select(0, order.index_select(0, starts));

  // ---- pairs of bins: each once, so only half of the directions

  std::vector<int64_t> half;
  for (int64_t c = 0; c <= axes[2].reach; c++)
    for (int64_t b = c > 0 ? -axes[1].reach : 0; b <= axes[1].reach; b++)
      for (int64_t a = c > 0 || b > 0 ? -axes[0].reach : 0; a <= axes[0].reach; a++)
        half.insert(half.end(), {a, b, c});
  const auto directions = torch::tensor(half, torch::kInt64).reshape({-1, 3}).to(device);

  const auto targets = occupied.unsqueeze(1) + directions.unsqueeze(0);
  const auto shifts = torch::floor_divide(targets, counts);
  const auto target_keys = key_of(targets - shifts * counts);
  const auto found = torch::searchsorted(keys, target_keys).clamp_max(keys.size(0) - 1);
  const auto exists = (keys.index_select(0, found.reshape(-1)).reshape_as(found) == target_keys) &
                      ((shifts == 0) | periodic.to(device)).all(-1);
  const auto where = exists.nonzero();
  const auto one = where.select(1, 0), direction = where.select(1, 1);
  const auto other = found.index({one, direction});
  const auto shift = shifts.index({one, direction});
  const auto shift_vectors = shift.to(torch::kFloat64).matmul(rows);
  // The first direction is that from a bin to itself.
  const auto same = direction == 0;
  const auto sizes_other = sizes.index_select(0, other);
  const auto candidates = sizes.index_select(0, one) * sizes_other;
  const auto candidate_ends = candidates.cumsum(0);
  const auto candidate_starts = candidate_ends - candidates;

  // ---- the pairs of their atoms

  std::vector<torch::Tensor> pairs;
  const int64_t total = candidate_ends[-1].item<int64_t>();
  const int64_t parts = (total + max_candidates - 1) / max_candidates;
  const auto limits = torch::arange(1, parts, integers) * max_candidates;
  const auto cuts = torch::searchsorted(candidate_ends, limits).to(torch::kCPU);
  int64_t begin = 0;
  for (int64_t part = 0; part < parts; part++) {
    const int64_t end = part + 1 < parts ? cuts[part].item<int64_t>() : where.size(0);
    if (begin == end)
      continue;
    const auto bins_of = torch::repeat_interleave(candidates.slice(0, begin, end)) + begin;
    const auto index = torch::arange(bins_of.size(0), integers) + candidate_starts[begin] -
                       candidate_starts.index_select(0, bins_of);
    const auto of_other = sizes_other.index_select(0, bins_of);
    const auto i =
        starts.index_select(0, one.index_select(0, bins_of)) + torch::floor_divide(index, of_other);
    const auto j =
        starts.index_select(0, other.index_select(0, bins_of)) + torch::remainder(index, of_other);
    const auto vectors = sorted.index_select(0, j) - sorted.index_select(0, i) +
                         shift_vectors.index_select(0, bins_of);
    const auto near = (vectors.square().sum(1) <= cutoff * cutoff) &
                      (same.index_select(0, bins_of).logical_not() | (i < j));
    const auto kept = near.nonzero().squeeze(1);
    const auto first = order.index_select(0, i.index_select(0, kept));
    const auto second = order.index_select(0, j.index_select(0, kept));
    const auto between = shift.index_select(0, bins_of.index_select(0, kept)) +
                         outside.index_select(0, first) - outside.index_select(0, second);
    pairs.push_back(
        torch::cat({first.unsqueeze(1), second.unsqueeze(1), between}, 1).to(torch::kInt32));
    begin = end;
  }
  return torch::cat(pairs);
}

} // namespace metatomic_tc::lammps
