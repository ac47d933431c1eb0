// SPDX-License-Identifier: GPL-2.0-or-later

#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <vector>

namespace metatomic_tc::lammps {

/// Whole cell vectors between two atoms.
using Shift = std::array<int32_t, 3>;

/// The simulation box as metatomic wants it.
struct Cell {
  /// Rows a, b, c; lower triangular as in LAMMPS; the row of a non-periodic direction is zero.
  double rows[3][3] = {};
  bool periodic[3] = {};

  /// The whole cell vectors closest to the displacement `d`.
  Shift nearest(const double d[3]) const;
};

/// The atoms a rank gives to the model: its owned atoms, and one representative of each other atom
/// that has ghosts here. All further periodic images are written as (evaluated atom, shift). On one
/// rank every ghost is an image of an owned atom, so exactly the owned atoms are evaluated, and
/// nothing has to be known of ghosts.
///
/// Ghosts outside the box are evaluated at their place in the box, where their owner has them: so
/// all ranks round a position to FP32 in the same way. (An error of 1 ulp at 10 A is 1e-6 A, or
/// 5e-5 eV/A in a covalent bond.)
class EvaluatedAtoms {
public:
  /// @param nlocal, nghost as in LAMMPS; without ghosts they stay unknown
  /// @param tag ID of each of the nlocal + nghost atoms; images of one atom share it
  /// @param skip true for atoms that the model must not see; same for all images of an atom
  /// @param x positions of all atoms
  /// @param outside distance of each ghost from this rank's subdomain
  /// @param center of the box
  void build(int nlocal, int nghost, const std::vector<int64_t> &tag, const std::vector<char> &skip,
             const double *const *x, const std::vector<double> &outside, const double center[3],
             const Cell &cell);

  /// Number of evaluated atoms, and of those that this rank owns, which come first.
  int size() const { return static_cast<int>(index_.size()); }
  int owned() const { return owned_; }

  /// The atom of LAMMPS that represents evaluated atom `i`.
  int lammps_index(int i) const { return index_[i]; }

  /// The evaluated atom that atom `k` of LAMMPS is an image of; -1 for skipped atoms.
  int evaluated(int k) const { return evaluated_[k]; }
  /// x[k] = (position of evaluated atom) + shift(k)·cell; not zero for representatives outside the
  /// box
  const Shift &shift(int k) const { return shift_[k]; }
  /// [n][3], of the evaluated atoms
  void positions(const double *const *x, const Cell &cell, std::vector<double> &positions) const;
  bool represents(int k) const { return evaluated_[k] >= 0 && index_[evaluated_[k]] == k; }

private:
  int owned_ = 0;
  std::vector<int> index_;
  std::vector<int> evaluated_;
  std::vector<Shift> shift_;
};

/// Two evaluated atoms that may be within the cutoff of each other: the vector between them is
/// x[second] - x[first] + shift·cell. Stands for both directions, (first, second, shift) and
/// (second, first, -shift).
struct Pair {
  int32_t first;
  int32_t second;
  Shift shift;

  auto operator<=>(const Pair &) const = default;
};

/// The neighbor list of LAMMPS (class NeighList), full, with neighbors of ghosts on several ranks.
struct LammpsList {
  /// Owned atoms followed by ghosts.
  int count;
  const int *ilist;
  const int *numneigh;
  const int *const *firstneigh;
  /// Bits of a neighbor that are its index.
  int mask;
};

/// All pairs of evaluated atoms in LAMMPS's list, each in one direction.
///
/// It is not what the model gets: models such as PET look up the reverse of every edge and give
/// wrong results everywhere when one is missing, and LAMMPS's list is not symmetric. A ghost at the
/// edge of the ghost region lacks neighbors that have it as theirs.
std::vector<Pair> pairs_of(const EvaluatedAtoms &atoms, const LammpsList &list);

/// Compares the pairs for a model with those in LAMMPS's list: the pairs of owned atoms must be the
/// same, and those between ghosts must include LAMMPS's. Returns "", or one sentence about the
/// first difference.
///
/// @param cutoff of both lists: pairs within rounding of it may be in one and not in the other
std::string compare(std::vector<Pair> pairs, std::vector<Pair> lammps, const EvaluatedAtoms &atoms,
                    const std::vector<double> &positions, const Cell &cell, double cutoff);

} // namespace metatomic_tc::lammps
