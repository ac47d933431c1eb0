// SPDX-License-Identifier: GPL-2.0-or-later

#ifndef LMP_PAIR_METATOMIC_TC_H
#define LMP_PAIR_METATOMIC_TC_H

#include "model.h"
#include "neighbor_list.h"
#include "pair.h"

#include <memory>
#include <string>
#include <vector>

namespace LAMMPS_NS {

/// Energies, forces and virial from a metatomic model whose linear layers run on Tensor Cores.
///
///     pair_style metatomic-tc MODE [keyword value ...]
///     pair_coeff * * MODEL.pt ELEMENT [ELEMENT ...]
///
/// MODE               how linear layers are computed: fp32, tf32, tf32x3, fp16x3, bf16x6, bf16x9
///                    or bf16x9-eager
/// device             cpu, cuda (one GPU per rank of a node, in turn) or cuda:N (GPU N on all
///                    ranks); default: cuda where there is a GPU and the model supports it, else
///                    cpu
/// extensions         directory searched first for the TorchScript extensions of the model
/// check_consistency  yes or no: let metatomic check inputs and outputs at every step, slow;
///                    default no
/// fallback           yes or no: use fp32 where the device does not support MODE, instead of an
///                    error; default no
///
/// ELEMENT, one for each atom type: a symbol or an atomic number, or NULL for atoms the model must
/// not see (they get no force from it).
///
/// Units metal (eV, A) and real (kcal/mol, A). Needs newton on, atom IDs and three dimensions.
class PairMetatomicTC : public Pair {
public:
  PairMetatomicTC(class LAMMPS *);
  ~PairMetatomicTC() override;

  void settings(int, char **) override;
  void coeff(int, char **) override;
  void init_style() override;
  double init_one(int, int) override;
  void compute(int, int) override;

private:
  metatomic_tc::lammps::ModelOptions options_;
  std::unique_ptr<metatomic_tc::lammps::Model> model_;
  /// Atomic number of each type, from 1; -1 for NULL.
  std::vector<int> atomic_number_;

  // What is kept between rebuilds of LAMMPS's neighbor list.
  metatomic_tc::lammps::EvaluatedAtoms atoms_;
  bigint last_build_ = -1;

  metatomic_tc::lammps::Structure structure_;

  void allocate();
  void check_neighbor_settings();
  metatomic_tc::lammps::Cell cell() const;
  double distance_outside(const double *x) const;
  void rebuild();
};

} // namespace LAMMPS_NS

#endif
