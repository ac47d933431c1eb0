// SPDX-License-Identifier: GPL-2.0-or-later

#pragma once

#include "device.h"
#include "neighbor_list.h"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace metatomic_tc::lammps {

/// How to load and run a model.
struct ModelOptions {
  /// See `metatomic_tc::parse_mode`.
  std::string mode;
  /// Which linear layers the mode applies to, see `metatomic_tc::LayerPattern`.
  std::string layers = "*";
  /// See `select_device`.
  std::string device;
  /// Directory searched first for the TorchScript extensions of the model; "" for none.
  std::string extensions;
  /// Let metatomic check inputs and outputs at every evaluation: slow.
  bool check_consistency = false;
  /// Use fp32 where the device does not support the mode.
  bool fallback = false;
  /// Which variant of an output to use: of all outputs for "", of one for "energy",
  /// "energy_uncertainty", "non_conservative_force" or "non_conservative_stress". An empty variant
  /// is the output without one.
  std::map<std::string, std::string> variants;
  /// Take forces and stress from outputs of their own, instead of the gradient of the energy.
  bool direct_forces = false;
  bool direct_stress = false;
  /// Ask for the uncertainty of atomic energies, if the model has it.
  bool uncertainty = true;
  /// In units of energy; without a value 0.1 eV. With one the model must have an uncertainty.
  std::optional<double> uncertainty_threshold;
  /// What the forward pass keeps in memory for the backward pass: all (fast), or little, in 1.4
  /// times the time (lean). Of the two, automatic is the one that there is memory for.
  enum class MemoryUse { automatic, fast, lean };
  MemoryUse memory = MemoryUse::automatic;
  /// Wait for the device where times are taken.
  bool profile = false;
  /// Units of everything that goes in and out, as metatomic writes them. The model itself always
  /// works in angstrom and eV: the numbers of SI units would be too small for FP32.
  std::string length_unit = "angstrom";
  std::string energy_unit = "eV";
};

/// What the model keeps of a structure where it computes, until its next build.
struct DeviceStructure;

/// A structure, in units of LAMMPS.
struct Structure {
  /// Of this step, as `positions`.
  Cell cell;
  /// Number of times that what follows was made anew; from the same number the model knows that it
  /// has it already, where it computes.
  int64_t build = 0;
  /// [n], atomic numbers
  std::vector<int32_t> types;
  /// Pairs closer than this in the positions and the cell of the build, even if it is seen only
  /// later, may come within the largest cutoff before the next build, others not.
  double list_cutoff = 0.0;
  std::vector<double> build_positions;
  Cell build_cell;
  /// The energy is that of the first `owned` atoms only.
  int64_t owned = 0;
  /// [n][3], of this step
  std::vector<double> positions;
  /// The model's.
  mutable std::shared_ptr<DeviceStructure> on_device;
};

/// What the model says, in units of LAMMPS.
struct Prediction {
  /// [owned]; empty if the model has no per-atom energy
  std::vector<double> energies;
  /// Sum over owned atoms, in double precision if the model has per-atom energies.
  double energy = 0.0;
  /// [owned]: the model's uncertainty of `energies`; empty if it has none or was not asked
  std::vector<double> uncertainties;
  /// [n][3]: minus the gradient of `energy`, ghosts included; or the non-conservative forces of the
  /// owned atoms, and zero for ghosts
  std::vector<double> forces;
  /// xx, yy, zz, xy, xz, yz: minus the gradient of `energy` with respect to strain; or minus the
  /// non-conservative stress times the volume
  double virial[6] = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
};

/// Bytes on the device.
struct Memory {
  /// What an evaluation needs for each atom, ghosts included.
  double per_atom = 0.0;
  /// What nobody has, and what this process has and does not use now.
  double free = 0.0;
  double cached = 0.0;
};

/// Seconds spent in parts of evaluations, and what was copied.
struct Times {
  /// Finding the pairs of a structure that was built anew.
  double pairs = 0.0;
  /// Putting the structure on the device and into metatomic's classes.
  double input = 0.0;
  double forward = 0.0;
  double backward = 0.0;
  /// Forward and backward where these are one.
  double step = 0.0;
  /// Getting results back from the device.
  double output = 0.0;
  /// Of evaluations of a structure that was not built anew: how many, of how many atoms together,
  /// and how many bytes went from the host to the device for them. On the CPU nothing is copied;
  /// these are then the bytes that a GPU would get.
  int64_t repeated = 0;
  int64_t repeated_atoms = 0;
  int64_t repeated_bytes = 0;
};

/// A metatomic model on one device, with its linear layers in one mode. Two models in one process
/// may differ in both.
class Model {
public:
  /// @throws std::exception with one sentence that names the file and says what to do
  Model(const std::string &path, const ModelOptions &options, const LocalRank &local);
  ~Model();

  /// Largest cutoff of the neighbor lists, in units of length of LAMMPS.
  double cutoff() const;
  /// How far an atom's energy depends on others, in units of length of LAMMPS; may be infinite.
  double interaction_range() const;
  bool has_type(int atomic_number) const;
  /// Atomic numbers the model knows, e.g. "1 6 7 8".
  std::string types() const;
  bool has_atomic_energies() const;
  /// The uncertainty of an atom's energy above which the user is to be warned, in units of energy
  /// of LAMMPS; negative when the model has none, or was not asked.
  double uncertainty_threshold() const;

  /// File, model, dtype, device, mode really used, layers replaced and left, versions; one line.
  std::string summary() const;
  /// What a user must know about the mode (it is emulated, changed, or not FP32-accurate).
  const std::vector<std::string> &warnings() const;

  /// Which GPU it is, the same in every process; "" on the CPU
  std::string gpu() const;
  /// Why a step that should have been a CUDA graph was not; "" if there was none.
  std::string graph_failure() const;

  /// @param virial whether to compute the virial
  /// @throws std::exception when the model fails; see `one_line`
  Prediction evaluate(const Structure &structure, bool virial);

  /// The virial of each atom, [n][9]: xx, yy, zz, xy, xz, yz, yx, zx, zy. Atom j has
  ///
  ///     W_j = sum over owned i of (x_i - x_j) (outer product) dU_i/dx_j
  ///
  /// with the atomic energies U_i, so the sum over j, ghosts included, is minus the gradient of the
  /// energy with respect to strain, and the sum of W_j v_j is the potential part of the heat flux
  /// (Langer et al., J. Chem. Phys. 159, 174105 (2023)). Needs four backward passes.
  ///
  /// @param structure not periodic: all periodic images within the interaction range of owned atoms
  ///        are atoms of their own
  /// @throws std::exception when the model fails or has no atomic energies
  std::vector<double> atomic_virials(const Structure &structure);

  /// Evaluates the model for some hundred neighboring atoms of `structure` and measures what that
  /// needs. No value on the CPU, and for structures that are not much larger than this.
  /// @throws std::exception when the model fails
  std::optional<Memory> estimate_memory(const Structure &structure);
  /// Has what comes next be lean, if it can be and is not yet.
  /// @return whether something changed
  bool use_less_memory();
  bool is_lean() const;
  /// "12.3 of 139.8 GiB in use" of the device, the most that evaluations needed since
  /// `reset_times` included; "" on the CPU
  std::string memory_use() const;

  /// The pairs that are used for `structure` until its next build, from where the model computes.
  std::vector<Pair> pairs(const Structure &structure);

  /// Since the last `reset_times`.
  const Times &times() const;
  void reset_times();

private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

/// @throws std::invalid_argument when `pattern` is none of layers, see `metatomic_tc::LayerPattern`
void check_layers(const std::string &pattern);

/// The modes of `metatomic_tc::parse_mode`.
/// @throws std::invalid_argument naming `mode` and the valid modes
void check_mode(const std::string &mode);

} // namespace metatomic_tc::lammps
