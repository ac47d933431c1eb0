// SPDX-License-Identifier: GPL-2.0-or-later

#pragma once

#include "neighbor_list.h"

#include <torch/types.h>

namespace metatomic_tc::lammps {

/// All pairs of atoms and periodic images of atoms not farther apart than `cutoff`, each once in
/// one of its two directions: [count,5] int32 with the columns of `Pair`. Made where `positions`
/// are, by tensor operations alone, in memory for some millions of pairs at a time; the order of
/// the pairs is the same for the same positions.
///
/// The cell may be smaller than the cutoff, and atoms may be outside of it.
///
/// @param positions [n,3] FP64
torch::Tensor cell_list(const torch::Tensor &positions, const Cell &cell, double cutoff);

} // namespace metatomic_tc::lammps
