// SPDX-License-Identifier: GPL-2.0-or-later

#include "model.h"

#include "cell_list.h"
#include "messages.h"
#include "model_file.h"
#include "model_implementation.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <stdexcept>

#include <ATen/DeviceAccelerator.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/version.h>

#include "metatomic_tc/convert.hpp"
#include "metatomic_tc/linear.hpp"
#include "metatomic_tc/modes.hpp"

namespace metatomic_tc::lammps {

void check_mode(const std::string &mode) {
  parse_mode(mode);
}

void check_layers(const std::string &pattern) {
  LayerPattern{pattern};
}

static std::string join(const std::vector<int64_t> &numbers) {
  std::string text;
  for (const auto number : numbers) {
    text += text.empty() ? "" : " ";
    text += std::to_string(number);
  }
  return text;
}

/// metatensor warns about files written by its older versions, and metatomic about what authors of
/// models left out, on every rank; whoever runs a model can do nothing about it.
class NoWarnings : public c10::WarningHandler {
  void process(const c10::Warning &) override {}
};

Model::Model(const std::string &path, const ModelOptions &options, const LocalRank &local) {
  check_file(path);
  NoWarnings no_warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&no_warnings);

  std::optional<std::string> extensions;
  if (!options.extensions.empty())
    extensions = options.extensions;
  try {
    implementation_ =
        std::make_unique<Implementation>(metatomic_torch::load_atomistic_model(path, extensions));
  } catch (const std::exception &error) {
    const std::string problem = one_line(error);
    const bool damaged = problem.find("CRC") != std::string::npos;
    throw std::runtime_error("cannot load the model " + path + ": " + problem +
                             (damaged ? "; the file is damaged, copy or download it again" : ""));
  }
  auto &self = *implementation_;
  self.check_consistency = options.check_consistency;
  self.angstrom = metatomic_torch::unit_conversion_factor(options.length_unit, "angstrom");
  self.energy_unit = metatomic_torch::unit_conversion_factor("eV", options.energy_unit);
  self.profile = options.profile;
  self.module.eval();
  for (auto parameter : self.module.parameters())
    parameter.set_requires_grad(false);

  self.capabilities = self.module.run_method("capabilities")
                          .toCustomClass<metatomic_torch::ModelCapabilitiesHolder>();
  if (self.capabilities->dtype() == "float64")
    self.dtype = torch::kFloat64;
  else if (self.capabilities->dtype() != "float32")
    throw std::runtime_error(path + " computes in " + self.capabilities->dtype() +
                             ", but only float32 and float64 models can be used");

  // ---- what the model can do and wants

  self.choose_outputs(path, options);

  if (self.module.find_method("requested_inputs")) {
    const auto inputs = self.module.run_method("requested_inputs", true).toGenericDict();
    std::string names;
    for (const auto &input : inputs)
      names += (names.empty() ? "" : ", ") + input.key().toStringRef();
    if (!names.empty())
      throw std::runtime_error(path +
                               " needs more than atoms and a cell, which pair_style "
                               "metatomic-tc cannot give it: " +
                               names);
  }

  for (const auto &list : self.module.run_method("requested_neighbor_lists").toList()) {
    self.lists.push_back(list.get().toCustomClass<metatomic_torch::NeighborListOptionsHolder>());
    self.requests.push_back(
        {self.lists.back()->engine_cutoff("angstrom"), self.lists.back()->full_list()});
  }
  self.interaction_range = self.capabilities->engine_interaction_range("angstrom");

  // ---- device and mode

  const std::string device_name =
      select_device(options.device, self.capabilities->supported_devices, local);
  self.device = torch::Device(device_name);
  if (self.device.is_cpu()) {
    set_cpu_threads(local);
  } else {
    // As metatomic's own pair style: with the default, static strategy TorchScript compiles kernels
    // for the shapes it sees first, and the number of pairs changes at every step. It is a setting
    // of the process, and it affects speed only, not what is computed.
    torch::jit::FusionStrategy strategy = {{torch::jit::FusionBehavior::DYNAMIC, 10}};
    torch::jit::setFusionStrategy(strategy);
  }
  const Hardware on = hardware(self.device);
  self.uuid = on.uuid;
  const Mode asked = parse_mode(options.mode);
  const Mode mode = resolve_mode(asked, on, options.fallback);

  // Before the first run: TorchScript compiles what it sees then.
  const ConversionReport report = convert_linear_layers(self.module, mode, options.layers);
  if (const auto problem = report.problem(options.layers, path); !problem.empty())
    throw std::runtime_error(problem);
  self.module.to(self.device);
  self.components = {self.sample_labels({"xyz"}, torch::arange(3, torch::kInt32).reshape({3, 1}))};
  self.properties = self.sample_labels({"distance"}, torch::zeros({1, 1}, torch::kInt32));

  const bool uncertainty = !self.uncertainty_key.empty();
  std::string no_step = self.check_consistency                           ? "check_consistency is on"
                        : options.direct_forces || options.direct_stress ? "non_conservative is on"
                        : uncertainty && self.uncertainty_key != "energy_uncertainty"
                            ? "the uncertainty is that of a variant"
                            : PetStep::why_not(self.module, self.energy_key, uncertainty);
  if (no_step.empty()) {
    self.step.emplace(self.module, self.energy_key, uncertainty);
    self.may_be_lean = options.memory != ModelOptions::MemoryUse::fast;
    self.step->set_lean(options.memory == ModelOptions::MemoryUse::lean);
    no_step = self.step->graph_problem();
  } else if (options.memory == ModelOptions::MemoryUse::lean) {
    throw std::runtime_error("memory lean is not possible with " + path + ": " + no_step);
  }

  if (mode != asked)
    self.warnings.push_back("mode " + to_string(asked) + " is not supported on " +
                            on.description() + ": using " + to_string(mode) +
                            ", as fallback yes allows");
  if (mode == Mode::tf32)
    self.warnings.push_back("mode tf32 does not have FP32 accuracy: forces may be wrong by "
                            "1e-3 eV/A and more, use it for comparison only");
  const bool emulated = self.device.is_cpu() && mode != Mode::fp32;

  std::ostringstream summary;
  summary << "metatomic-tc: model " << path;
  const auto metadata =
      self.module.run_method("metadata").toCustomClass<metatomic_torch::ModelMetadataHolder>();
  if (!metadata->name.empty())
    summary << " (" << metadata->name << ")";
  summary << ", " << self.capabilities->dtype() << ", on " << device_name;
  if (self.device.is_cuda())
    summary << " " << on.description();
  summary << ", mode " << to_string(mode) << (emulated ? " (emulated on the CPU)" : "") << ", "
          << report.replaced() << " linear layers replaced and " << report.left()
          << " left in FP32";
  // FP64 models compute in FP64 in every mode
  std::string kernels;
  if (self.dtype == torch::kFloat32)
    for (const std::string &kernel : report.kernels(on))
      kernels += (kernels.empty() ? "; kernels for many rows: " : ", ") + kernel;
  summary << kernels << "; metatomic-tc " METATOMIC_TC_VERSION ", torch " TORCH_VERSION;
  if (self.device.is_cuda())
    summary << (no_step.empty() ? ", steps as CUDA graphs" : ", no CUDA graphs since " + no_step);
  if (self.step && self.step->lean())
    summary << ", memory lean";
  self.summary = summary.str();
}

Model::~Model() = default;

double Model::cutoff() const {
  double cutoff = 0.0;
  for (const auto &request : implementation_->requests)
    cutoff = std::max(cutoff, request.cutoff);
  return cutoff / implementation_->angstrom;
}

double Model::interaction_range() const {
  return implementation_->interaction_range / implementation_->angstrom;
}

bool Model::has_type(int atomic_number) const {
  const auto &types = implementation_->capabilities->atomic_types;
  return std::find(types.begin(), types.end(), atomic_number) != types.end();
}

std::string Model::types() const {
  auto types = implementation_->capabilities->atomic_types;
  std::sort(types.begin(), types.end());
  return join(types);
}

bool Model::has_atomic_energies() const {
  return implementation_->atomic_energies;
}
std::string Model::summary() const {
  return implementation_->summary;
}
const std::vector<std::string> &Model::warnings() const {
  return implementation_->warnings;
}

std::string Model::graph_failure() const {
  const auto &step = implementation_->step;
  return step ? step->capture_problem() : "";
}

std::string Model::gpu() const {
  return implementation_->uuid;
}

double Model::uncertainty_threshold() const {
  return implementation_->uncertainty_threshold;
}

const Times &Model::times() const {
  return implementation_->times;
}
void Model::reset_times() {
  implementation_->times = Times();
  if (implementation_->device.is_cuda())
    at::accelerator::resetPeakStats(implementation_->device.index());
}

DeviceStructure &Model::Implementation::on_device(const Structure &structure) {
  if (is_on_device(structure))
    return *structure.on_device;
  auto start = std::chrono::steady_clock::now();
  const auto n = static_cast<int64_t>(structure.types.size());
  structure.on_device = std::make_shared<DeviceStructure>();
  auto &kept = *structure.on_device;
  kept.types = to_device(structure.types.data(), {n}, torch::kInt32).clone();
  kept.periodic = to_device(structure.build_cell.periodic, {3}, torch::kBool).clone();
  Cell cell = structure.build_cell;
  for (auto &row : cell.rows)
    for (double &x : row)
      x *= angstrom;
  const auto positions = to_device(structure.build_positions.data(), {n, 3}, torch::kFloat64);
  kept.pairs = cell_list(positions * angstrom, cell, structure.list_cutoff * angstrom);
  if (structure.owned < n) {
    const auto options = torch::TensorOptions(torch::kInt32).device(device);
    auto values = torch::zeros({structure.owned, 2}, options);
    values.select(1, 1).copy_(torch::arange(structure.owned, options));
    kept.selected = sample_labels({"system", "atom"}, values);
  }
  kept.build = structure.build;
  // It is part of making the input, but has a time of its own.
  double elapsed = 0.0;
  stamp(start, elapsed);
  times.pairs += elapsed;
  times.input -= elapsed;
  return kept;
}

std::vector<Pair> Model::pairs(const Structure &structure) {
  auto &self = *implementation_;
  const OnDevice on_device(self.device);
  const auto host = self.on_device(structure).pairs.to(torch::kCPU).contiguous();
  static_assert(sizeof(Pair) == 5 * sizeof(int32_t));
  std::vector<Pair> pairs(host.size(0));
  std::copy_n(host.data_ptr<int32_t>(), host.numel(), reinterpret_cast<int32_t *>(pairs.data()));
  return pairs;
}

Prediction Model::evaluate(const Structure &structure, bool virial) {
  auto &self = *implementation_;
  const OnDevice on_device(self.device);
  return self.step ? self.evaluate_step(structure) : self.evaluate_whole(structure, virial);
}

std::vector<double> Model::atomic_virials(const Structure &structure) {
  auto &self = *implementation_;
  const OnDevice on_device(self.device);
  try {
    return self.atomic_virials(structure);
  } catch (const std::exception &) {
    // The graph holds the memory of a whole step. TorchScript does not let out of memory be told
    // from other errors, which come again.
    if (!self.step || self.step->graph_memory() == 0)
      throw;
  }
  self.step->release();
  return self.atomic_virials(structure);
}

} // namespace metatomic_tc::lammps
