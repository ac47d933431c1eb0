// SPDX-License-Identifier: GPL-2.0-or-later

#include "neighbor_list.h"

#include <algorithm>
#include <cmath>
#include <iterator>
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
  if (nghost == 0)
    return;

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

std::vector<Pair> pairs_of(const EvaluatedAtoms &atoms, const LammpsList &list) {
  std::vector<Pair> pairs;
  for (int m = 0; m < list.count; m++) {
    const int k = list.ilist[m];
    if (!atoms.represents(k))
      continue;
    for (int n = 0; n < list.numneigh[k]; n++) {
      const int neighbor = list.firstneigh[k][n] & list.mask;
      if (atoms.evaluated(neighbor) >= 0)
        pairs.push_back({atoms.evaluated(k), atoms.evaluated(neighbor),
                         atoms.shift(neighbor) + -atoms.shift(k)});
    }
  }
  return pairs;
}

/// Each pair once, in the direction that goes to the larger index or shift, in order.
static void sort_pairs(std::vector<Pair> &pairs) {
  for (auto &pair : pairs)
    if (pair.first > pair.second || (pair.first == pair.second && pair.shift < -pair.shift))
      pair = {pair.second, pair.first, -pair.shift};
  std::sort(pairs.begin(), pairs.end());
  pairs.erase(std::unique(pairs.begin(), pairs.end()), pairs.end());
}

std::string compare(std::vector<Pair> pairs, std::vector<Pair> lammps, const EvaluatedAtoms &atoms,
                    const std::vector<double> &positions, const Cell &cell, double cutoff) {
  const size_t count = pairs.size();
  sort_pairs(pairs);
  sort_pairs(lammps);
  const auto describe = [&](const Pair &pair) {
    double square = 0.0;
    for (int m = 0; m < 3; m++) {
      double d = positions[3 * pair.second + m] - positions[3 * pair.first + m];
      for (int k = 0; k < 3; k++)
        d += pair.shift[k] * cell.rows[k][m];
      square += d * d;
    }
    const double distance = std::sqrt(square);
    if (std::abs(distance - cutoff) <= 1e-9 * cutoff)
      return std::string();
    return std::to_string(pair.first) + " and " + std::to_string(pair.second) + " with shift " +
           std::to_string(pair.shift[0]) + " " + std::to_string(pair.shift[1]) + " " +
           std::to_string(pair.shift[2]) + ", " + std::to_string(distance) + " apart,";
  };
  if (pairs.size() != count)
    return std::to_string(count - pairs.size()) + " of the model's " + std::to_string(count) +
           " pairs are there twice";
  std::vector<Pair> missing, more;
  std::set_difference(lammps.begin(), lammps.end(), pairs.begin(), pairs.end(),
                      std::back_inserter(missing));
  std::set_difference(pairs.begin(), pairs.end(), lammps.begin(), lammps.end(),
                      std::back_inserter(more));
  for (const auto &pair : missing)
    if (const auto text = describe(pair); !text.empty())
      return "the model lacks the pair of its atoms " + text + " which LAMMPS's list has";
  for (const auto &pair : more)
    if (pair.first < atoms.owned() || pair.second < atoms.owned())
      if (const auto text = describe(pair); !text.empty())
        return "the model has the pair of its atoms " + text + " which LAMMPS's list lacks";
  return "";
}

} // namespace metatomic_tc::lammps
