// SPDX-License-Identifier: GPL-2.0-or-later

#include "neighbor_list.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

namespace metatomic_tc::lammps {

static Shift operator-(const Shift &a) {
  return {-a[0], -a[1], -a[2]};
}
static Shift operator+(const Shift &a, const Shift &b) {
  return {a[0] + b[0], a[1] + b[1], a[2] + b[2]};
}

Shift Cell::nearest(const double d[3]) const {
  Shift shift = {0, 0, 0};
  double rest[3] = {d[0], d[1], d[2]};
  // Lower triangular: only c has a z component, only b and c have y components.
  for (int k = 2; k >= 0; k--) {
    if (!periodic[k])
      continue;
    const double fraction = rest[k] / rows[k][k];
    shift[k] = static_cast<int32_t>(std::lround(fraction));
    for (int m = 0; m < 3; m++)
      rest[m] -= shift[k] * rows[k][m];
  }
  return shift;
}

void EvaluatedAtoms::build(int nlocal, int nghost, const std::vector<int64_t> &tag,
                           const std::vector<char> &skip, const double *const *x,
                           const std::vector<double> &outside, const double center[3],
                           const Cell &cell) {
  const int nall = nlocal + nghost;
  index_.clear();
  evaluated_.assign(nall, -1);
  shift_.assign(nall, Shift{0, 0, 0});

  for (int k = 0; k < nlocal; k++) {
    if (skip[k])
      continue;
    evaluated_[k] = size();
    index_.push_back(k);
  }
  owned_ = size();

  // The images of each atom, the one to represent it first: the owned atom, else the ghost nearest
  // to the subdomain. Nothing that matters to an owned atom is closer to any other image of a ghost
  // than to the nearest one, so if an image has all its neighbors here, its representative has too.
  std::vector<int> order(nall);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    return std::make_tuple(tag[a], a >= nlocal, outside[a], a) <
           std::make_tuple(tag[b], b >= nlocal, outside[b], b);
  });

  for (int start = 0, end = 0; start < nall; start = end) {
    const int first = order[start];
    while (end < nall && tag[order[end]] == tag[first])
      end++;
    if (skip[first])
      continue;
    const auto displacement = [&](int k, const double origin[3]) {
      const double d[3] = {x[k][0] - origin[0], x[k][1] - origin[1], x[k][2] - origin[2]};
      return cell.nearest(d);
    };
    if (first >= nlocal) {
      evaluated_[first] = size();
      shift_[first] = displacement(first, center);
      index_.push_back(first);
    }
    for (int m = start + 1; m < end; m++) {
      const int k = order[m];
      evaluated_[k] = evaluated_[first];
      shift_[k] = shift_[first] + displacement(k, x[first]);
    }
  }
}

void EvaluatedAtoms::positions(const double *const *x, const Cell &cell,
                               std::vector<double> &positions) const {
  positions.resize(3 * size());
  for (int i = 0; i < size(); i++) {
    const int k = index_[i];
    const Shift &s = shift_[k];
    for (int m = 0; m < 3; m++)
      positions[3 * i + m] =
          x[k][m] - (s[0] * cell.rows[0][m] + s[1] * cell.rows[1][m] + s[2] * cell.rows[2][m]);
  }
}

static bool is_positive(const Shift &shift) {
  return shift > Shift{0, 0, 0};
}

std::vector<Pair> find_pairs(const EvaluatedAtoms &atoms, const LammpsList &list) {
  std::vector<Pair> pairs;
  std::vector<Pair> between_ghosts;
  for (int m = 0; m < list.count; m++) {
    const int k = list.ilist[m];
    if (!atoms.represents(k))
      continue;
    const int i = atoms.evaluated(k);
    for (int n = 0; n < list.numneigh[k]; n++) {
      const int neighbor = list.firstneigh[k][n] & list.mask;
      const int j = atoms.evaluated(neighbor);
      if (j < 0)
        continue;
      const Shift shift = atoms.shift(neighbor) + -atoms.shift(k);
      if (i < atoms.owned()) {
        // Owned atoms have all their neighbors: one direction of each pair will do.
        if (i < j || (i == j && is_positive(shift)))
          pairs.push_back({i, j, shift});
      } else if (j >= atoms.owned()) {
        // Ghosts do not: take both directions, and drop duplicates below.
        if (i < j || (i == j && is_positive(shift)))
          between_ghosts.push_back({i, j, shift});
        else
          between_ghosts.push_back({j, i, -shift});
      }
    }
  }

  const auto key = [](const Pair &pair) { return std::tie(pair.first, pair.second, pair.shift); };
  std::sort(between_ghosts.begin(), between_ghosts.end(),
            [&](const Pair &a, const Pair &b) { return key(a) < key(b); });
  std::unique_copy(between_ghosts.begin(), between_ghosts.end(), std::back_inserter(pairs),
                   [&](const Pair &a, const Pair &b) { return key(a) == key(b); });
  return pairs;
}

} // namespace metatomic_tc::lammps
