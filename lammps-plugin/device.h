// SPDX-License-Identifier: GPL-2.0-or-later

#pragma once

#include <string>
#include <vector>

namespace metatomic_tc::lammps {

/// Where this MPI rank is among the ranks of its node.
struct LocalRank {
  /// From 0 to count - 1.
  int index;
  int count;
};

/// Reads the local rank from the environment of the MPI launcher (MPICH and Intel MPI, Open MPI,
/// MVAPICH, Slurm). Without one all ranks are taken to be on one node: no MPI is called, so that
/// one plugin serves LAMMPS with and without MPI.
///
/// @param rank, size rank and number of ranks of this LAMMPS
LocalRank local_rank(int rank, int size);

/// The torch device of this rank.
///
/// @param requested "cpu", "cuda" (local rank modulo the number of GPUs), "cuda:N" (the same GPU on
///        every rank), or "" for cuda where there is a GPU and the model supports it, else cpu
/// @param supported what the model supports, e.g. {"cuda", "cpu"}
/// @return "cpu" or "cuda:N"
/// @throws std::runtime_error when `requested` does not exist here or the model does not support it
std::string select_device(const std::string &requested, const std::vector<std::string> &supported,
                          const LocalRank &local);

/// On the CPU: shares the cores of the node among its ranks, unless OMP_NUM_THREADS says otherwise.
void set_cpu_threads(const LocalRank &local);

} // namespace metatomic_tc::lammps
