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
/// MODE                   how linear layers are computed: fp32, tf32, tf32x3, fp16x3, bf16x6,
///                        bf16x9 or bf16x9-eager
/// device                 cpu, cuda (one GPU per rank of a node, in turn) or cuda:N (GPU N on all
///                        ranks); default: cuda where there is a GPU and the model supports it,
///                        else cpu
/// extensions             directory searched first for the TorchScript extensions of the model
/// check_consistency      yes or no: let metatomic check inputs and outputs at every step, slow;
///                        default no
/// fallback               yes or no: use fp32 where the device does not support MODE, instead of an
///                        error; default no
/// layers                 shell-style pattern: MODE applies to layers with such a path (with ! in
///                        front: to all others), the rest stays in FP32; default *
/// scale                  factor on energies, forces and virial; default 1
/// variant, variant/NAME  which variant of all outputs, or of output NAME: energy,
///                        energy_uncertainty, non_conservative_force or non_conservative_stress;
///                        off for none, the default
/// non_conservative       on, off, forces or stress: take both, none or one of them from outputs of
///                        the model instead of the gradient of the energy; default off
/// uncertainty_threshold  energy or off: warn where an atom's energy is more uncertain; default
///                        0.1 eV if the model has an uncertainty
/// memory                 fast: keep everything for the backward pass; lean: keep little, in 1.4
///                        times the time, only PET with the backend of metatomic-tc; auto: lean
///                        where the memory of the GPU is too small for fast; default auto
/// profile                yes or no: print at the end of a run where its time went; default no
///
/// ELEMENT, one for each atom type: a symbol or an atomic number, or NULL for atoms the model must
/// not see (they get no force from it).
///
/// Units metal, real, si and electron. Needs newton on, atom IDs and three dimensions.
class PairMetatomicTC : public Pair {
public:
  PairMetatomicTC(class LAMMPS *);
  ~PairMetatomicTC() override;

  void settings(int, char **) override;
  void coeff(int, char **) override;
  void init_style() override;
  double init_one(int, int) override;
  void compute(int, int) override;
  void finish() override;

  /// "scale", for fix adapt and others
  void *extract(const char *, int &) override;
  /// "uncertainty" of the energy of each atom, for fix pair
  void *extract_peratom(const char *, int &) override;

private:
  metatomic_tc::lammps::ModelOptions options_;
  std::unique_ptr<metatomic_tc::lammps::Model> model_;
  /// Atomic number of each type, from 1; -1 for NULL.
  std::vector<int> atomic_number_;

  // What is kept between rebuilds of LAMMPS's neighbor list.
  metatomic_tc::lammps::EvaluatedAtoms atoms_;
  bigint last_build_ = -1;

  metatomic_tc::lammps::Structure structure_;

  double scale_ = 1.0;
  /// g/mol
  double mass_unit_ = 1.0;
  bool masses_checked_ = false;
  /// Whether the user knows how atoms are shared among ranks, and what memory they need.
  bool reported_ = false;
  /// Whether the user knows that there are no CUDA graphs.
  bool graph_failed_ = false;

  /// [uncertainty_size_]
  double *uncertainty_ = nullptr;
  int uncertainty_size_ = 0;

  /// Whether there is a compute that asks for per-atom virials; then for them, as above, all
  /// periodic images as atoms of their own.
  bool atomic_virials_ = false;
  metatomic_tc::lammps::EvaluatedAtoms images_;
  metatomic_tc::lammps::Structure image_structure_;

  /// Seconds, of the current run.
  struct RunTimes {
    bigint steps = 0;
    double pair = 0.0;
    double pairs = 0.0;
  };
  RunTimes times_;

  void allocate();
  void forget_model();
  void check_neighbor_settings();
  metatomic_tc::lammps::Cell cell() const;
  double distance_outside(const double *x) const;
  void rebuild();
  void check_pairs(const metatomic_tc::lammps::EvaluatedAtoms &,
                   const metatomic_tc::lammps::Structure &);
  void build_structure(const metatomic_tc::lammps::EvaluatedAtoms &,
                       const metatomic_tc::lammps::Cell &, metatomic_tc::lammps::Structure &);
  std::vector<double> gather(std::vector<double>) const;
  void report_atoms();
  void check_memory();
  /// Stops all ranks, which all see the same problem; with `{}` in the text for each argument.
  template <typename... Args> [[noreturn]] void refuse(const std::string &, const Args &...) const;
  template <typename... Args> void warn(const std::string &, const Args &...) const;
  [[noreturn]] void stop(const std::string &);
  void fail(const std::string &);
  void evaluate();
  void check_masses();
  void check_uncertainty(const std::vector<double> &);
  void grow_uncertainty();
};

} // namespace LAMMPS_NS

#endif
