// SPDX-License-Identifier: GPL-2.0-or-later

#pragma once

#include "model.h"

#include <chrono>
#include <optional>

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/cuda.h>
#include <torch/script.h>

#include <metatensor/torch.hpp>
#include <metatomic/torch.hpp>

#include "metatomic_tc/pet_step.hpp"

namespace metatomic_tc::lammps {

/// A neighbor list the model asks for.
struct NeighborRequest {
  /// In angstrom.
  double cutoff;
  /// Both directions of each pair, or one.
  bool full;
};

struct DeviceStructure {
  int64_t build = 0;
  torch::Tensor types, periodic, pairs;
  /// Of the owned atoms; undefined when these are all.
  torch::optional<metatensor_torch::Labels> selected;
  /// The atoms that rows of outputs belong to, as they were seen last, and where that is on the
  /// host.
  torch::Tensor atoms;
  std::vector<int64_t> host_atoms;
};

struct Model::Implementation {
  Implementation(metatensor_torch::Module loaded) : module(std::move(loaded)) {}

  metatensor_torch::Module module;
  metatomic_torch::ModelCapabilities capabilities;
  std::vector<metatomic_torch::NeighborListOptions> lists;
  std::vector<NeighborRequest> requests;
  double interaction_range = 0.0;
  std::string energy_key;
  bool atomic_energies = false;
  /// "" when not used
  std::string uncertainty_key;
  double uncertainty_threshold = -1.0;
  std::string forces_key;
  std::string stress_key;
  bool profile = false;
  Times times;
  torch::Device device = torch::kCPU;
  /// Of the GPU, see `Hardware`.
  std::string uuid;
  torch::Dtype dtype = torch::kFloat32;
  bool check_consistency = false;
  /// Angstrom in a unit of length of LAMMPS, and units of energy of LAMMPS in an eV.
  double angstrom = 1.0;
  double energy_unit = 1.0;
  /// Of the blocks of neighbor lists.
  std::vector<metatensor_torch::Labels> components;
  metatensor_torch::Labels properties;
  /// Bytes of the current evaluation that go to the device.
  int64_t copied = 0;
  torch::Dict<std::string, metatomic_torch::ModelOutput> outputs;
  /// For steps of one structure, the one it was built for last; none if the model or what is asked
  /// of it needs metatomic's way.
  std::optional<PetStep> step;
  bool may_be_lean = false;
  const Structure *step_structure = nullptr;
  int64_t step_build = 0;
  std::string summary;
  std::vector<std::string> warnings;

  metatensor_torch::Labels sample_labels(const std::vector<std::string> &names,
                                         torch::Tensor values) const {
    return torch::make_intrusive<metatensor_torch::LabelsHolder>(names, values.to(device),
                                                                 metatensor::assume_unique{});
  }

  /// Which outputs are asked for, and how they are called.
  void choose_outputs(const std::string &path, const ModelOptions &options);
  /// The name of an output in the variant that was asked for.
  std::string pick(const std::string &name, const ModelOptions &options) const;
  void request(const std::string &key, const std::string &unit, const std::string &sample_kind);

  /// A structure on the device.
  struct Input {
    metatomic_torch::System system;
    /// FP64, with gradient if it was asked for
    torch::Tensor positions;
    /// undefined without virial
    torch::Tensor strain;
  };

  Input input(const Structure &structure, bool gradient, bool virial);
  Prediction evaluate_step(const Structure &structure);
  Prediction evaluate_whole(const Structure &structure, bool virial);
  std::vector<double> atomic_virials(const Structure &structure);
  c10::impl::GenericDict run(const Structure &structure, const metatomic_torch::System &system,
                             const torch::Dict<std::string, metatomic_torch::ModelOutput> &wanted);
  /// [rows] the owned atom that each row of an output belongs to
  const std::vector<int64_t> &atoms_of(const metatensor_torch::TensorBlock &block,
                                       const Structure &structure, const std::string &what);
  /// What goes from the host to the device goes through here. A tensor on the CPU shares the memory
  /// of `data`, which must outlive it.
  torch::Tensor to_device(const void *data, at::IntArrayRef shape, torch::Dtype dtype) {
    const auto tensor = torch::from_blob(const_cast<void *>(data), shape, dtype);
    copied += static_cast<int64_t>(tensor.nbytes());
    return tensor.to(device);
  }
  /// Whether the structure has not been built anew since it was evaluated last.
  static bool is_on_device(const Structure &structure) {
    return structure.on_device && structure.on_device->build == structure.build;
  }
  /// What belongs to the build of `structure`, which is made if it is not there.
  DeviceStructure &on_device(const Structure &structure);

  /// Adds the time since `start` to `sum`, and starts again.
  void stamp(std::chrono::steady_clock::time_point &start, double &sum) const {
    if (profile && device.is_cuda())
      torch::cuda::synchronize(device.index());
    const auto now = std::chrono::steady_clock::now();
    sum += std::chrono::duration<double>(now - start).count();
    start = now;
  }
};

inline torch::Tensor to_host(const torch::Tensor &tensor) {
  return tensor.detach().to(torch::kCPU, torch::kFloat64).contiguous();
}

inline metatensor_torch::TensorBlock block_of(const c10::impl::GenericDict &outputs,
                                              const std::string &key) {
  return metatensor_torch::TensorMapHolder::block_by_id(
      outputs.at(key).toCustomClass<metatensor_torch::TensorMapHolder>(), 0);
}

/// The six components of the virial from the gradient with respect to strain, [3,3].
inline void set_virial(const torch::Tensor &by_strain, double unit, double (&virial)[6]) {
  const auto host = to_host(by_strain);
  const auto g = host.accessor<double, 2>();
  // The strain has nine components, of which three are rotations: PET is not exactly invariant.
  const int rows[6] = {0, 1, 2, 0, 0, 1};
  const int columns[6] = {0, 1, 2, 1, 2, 2};
  for (int m = 0; m < 6; m++)
    virial[m] = -0.5 * (g[rows[m]][columns[m]] + g[columns[m]][rows[m]]) * unit;
}

/// How torch runs while it exists: on the right GPU, or without TorchScript's optimizer.
class OnDevice {
public:
  explicit OnDevice(const torch::Device &device) {
    if (device.is_cuda()) {
      device_.emplace(device);
    } else {
      // On the CPU TorchScript has nothing to fuse: its optimizer takes three seconds of the first
      // steps and then gains nothing.
      optimizer_.emplace(false);
    }
  }

private:
  std::optional<c10::DeviceGuard> device_;
  std::optional<torch::jit::GraphOptimizerEnabledGuard> optimizer_;
};

} // namespace metatomic_tc::lammps
