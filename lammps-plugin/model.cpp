// SPDX-License-Identifier: GPL-2.0-or-later

#include "model.h"

#include "cell_list.h"
#include "messages.h"
#include "model_file.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <iomanip>
#include <optional>
#include <sstream>
#include <stdexcept>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/cuda.h>
#include <torch/script.h>
#include <torch/version.h>

#include <metatensor/torch.hpp>
#include <metatomic/torch.hpp>

#include "metatomic_tc/convert.hpp"
#include "metatomic_tc/linear.hpp"
#include "metatomic_tc/hardware.hpp"
#include "metatomic_tc/modes.hpp"
#include "metatomic_tc/pet_step.hpp"

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

/// A neighbor list the model asks for.
struct NeighborRequest {
  /// In angstrom.
  double cutoff;
  /// Both directions of each pair, or one.
  bool full;
};

struct Model::Implementation {
  Implementation(metatensor_torch::Module loaded) : module(std::move(loaded)) {}

  metatensor_torch::Module module;
  metatomic_torch::ModelCapabilities capabilities;
  std::vector<metatomic_torch::NeighborListOptions> lists;
  std::vector<NeighborRequest> requests;
  /// What a structure has until its next build, on the device.
  struct Kept {
    int64_t build = 0;
    torch::Tensor types, periodic, pairs;
    /// Of the owned atoms; undefined when these are all.
    torch::optional<metatensor_torch::Labels> selected;
    /// The atoms that rows of outputs belong to, as they were seen last, and where that is on the
    /// host.
    torch::Tensor atoms;
    std::vector<int64_t> host_atoms;
  };
  std::map<const Structure *, Kept> kept_structures;
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

  /// The name of an output in the variant that was asked for.
  std::string pick(const std::string &name, const ModelOptions &options) const {
    std::optional<std::string> variant;
    for (const std::string &key : {std::string(), name})
      if (const auto found = options.variants.find(key); found != options.variants.end())
        variant = found->second.empty() ? std::nullopt : std::make_optional(found->second);
    return metatomic_torch::pick_output(name, capabilities->outputs(), variant);
  }

  void request(const std::string &key, const std::string &unit, const std::string &sample_kind) {
    outputs.insert(key, torch::make_intrusive<metatomic_torch::ModelOutputHolder>(
                            "", unit, sample_kind, std::vector<std::string>(), ""));
  }

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
  Kept &kept(const Structure &structure);

  /// Adds the time since `start` to `sum`, and starts again.
  void stamp(std::chrono::steady_clock::time_point &start, double &sum) const {
    if (profile && device.is_cuda())
      torch::cuda::synchronize(device.index());
    const auto now = std::chrono::steady_clock::now();
    sum += std::chrono::duration<double>(now - start).count();
    start = now;
  }
};

static torch::Tensor to_host(const torch::Tensor &tensor) {
  return tensor.detach().to(torch::kCPU, torch::kFloat64).contiguous();
}

static metatensor_torch::TensorBlock block_of(const c10::impl::GenericDict &outputs,
                                              const std::string &key) {
  return metatensor_torch::TensorMapHolder::block_by_id(
      outputs.at(key).toCustomClass<metatensor_torch::TensorMapHolder>(), 0);
}

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

  const auto available = self.capabilities->outputs();
  std::string has_outputs;
  for (const auto &output : available)
    has_outputs += (has_outputs.empty() ? "; the outputs of the model are " : ", ") + output.key();
  try {
    self.energy_key = self.pick("energy", options);
  } catch (const std::exception &error) {
    throw std::runtime_error(path + " has no such energy: " + one_line(error) + has_outputs);
  }
  self.atomic_energies = available.at(self.energy_key)->sample_kind() == "atom";
  self.request(self.energy_key, "eV", self.atomic_energies ? "atom" : "system");

  if (options.uncertainty) {
    std::string problem = "its uncertainty is not one of atoms";
    try {
      self.uncertainty_key = self.pick("energy_uncertainty", options);
    } catch (const std::exception &error) {
      problem = one_line(error);
    }
    if (!self.uncertainty_key.empty() &&
        available.at(self.uncertainty_key)->sample_kind() != "atom")
      self.uncertainty_key.clear();
    const bool demanded =
        options.uncertainty_threshold.has_value() || options.variants.count("energy_uncertainty");
    if (self.uncertainty_key.empty() && demanded)
      throw std::runtime_error(path + " has no such uncertainty of the energies of atoms, which " +
                               "uncertainty_threshold needs: " + problem + has_outputs);
    if (!self.uncertainty_key.empty()) {
      self.uncertainty_threshold = options.uncertainty_threshold.value_or(0.1 * self.energy_unit);
      self.request(self.uncertainty_key, "eV", "atom");
    }
  }

  const auto direct = [&](const std::string &quantity, const std::string &unit,
                          const std::string &sample_kind) {
    std::string problem;
    std::vector<std::string> names = {"non_conservative_" + quantity};
    // as older models call it
    if (quantity == "force")
      names.push_back("non_conservative_forces");
    for (const auto &name : names) {
      auto with_name = options;
      if (const auto found = options.variants.find(names[0]); found != options.variants.end())
        with_name.variants[name] = found->second;
      try {
        const auto key = self.pick(name, with_name);
        self.request(key, unit, sample_kind);
        return key;
      } catch (const std::exception &error) {
        problem += (problem.empty() ? "" : "; ") + one_line(error);
      }
    }
    throw std::runtime_error(path + " has no such non-conservative " + quantity +
                             ", which the keyword non_conservative asks for: " + problem +
                             has_outputs);
  };
  if (options.direct_forces)
    self.forces_key = direct("force", "eV/angstrom", "atom");
  if (options.direct_stress)
    self.stress_key = direct("stress", "eV/angstrom^3", "system");

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
  if (!LayerPattern(options.layers).matches_all() && report.replaced() == 0 &&
      !report.layers.empty())
    throw std::runtime_error(
        "layers " + options.layers + " chooses none of the " +
        std::to_string(report.layers.size()) + " linear layers of " + path + ", such as " +
        report.layers.front().path + " and " + report.layers.back().path +
        ", or only such that are too small for a mode; all of them are listed by: metatomic-tc "
        "info " +
        path + " --layers '*'");
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
          << " left in FP32; metatomic-tc " METATOMIC_TC_VERSION ", torch " TORCH_VERSION;
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

/// Pairs of atoms as metatomic wants them.
struct NeighborPairs {
  /// [count,5]: first atom, second atom, cell shifts a, b, c
  torch::Tensor samples;
  /// [count,3], FP64: x[second] - x[first] + shift·cell
  torch::Tensor vectors;
};

/// The vectors of all `pairs`, [count,5]. On the device and not in a loop here: there are some 100
/// pairs for each atom, and only the positions change from step to step.
static NeighborPairs distances(const torch::Tensor &pairs, const torch::Tensor &positions,
                               const torch::Tensor &cell) {
  const auto first = positions.index_select(0, pairs.select(1, 0));
  const auto second = positions.index_select(0, pairs.select(1, 1));
  const auto shift = pairs.slice(1, 2).to(torch::kFloat64).matmul(cell);
  return {pairs, second - first + shift};
}

/// The pairs not farther apart than the cutoff; with `full`, each in both directions, which are
/// decided together, from one distance in double precision.
static NeighborPairs select(const NeighborPairs &candidates, const NeighborRequest &request) {
  const auto inside = candidates.vectors.square().sum(1) <= request.cutoff * request.cutoff;
  const auto index = inside.nonzero().squeeze(1);
  auto samples = candidates.samples.index_select(0, index);
  auto vectors = candidates.vectors.index_select(0, index);
  if (request.full) {
    const auto reverse =
        torch::cat({samples.slice(1, 1, 2), samples.slice(1, 0, 1), samples.slice(1, 2).neg()}, 1);
    samples = torch::cat({samples, reverse});
    vectors = torch::cat({vectors, vectors.neg()});
  }
  return {samples, vectors};
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

Model::Implementation::Kept &Model::Implementation::kept(const Structure &structure) {
  auto &kept = kept_structures[&structure];
  if (kept.build == structure.build)
    return kept;
  auto start = std::chrono::steady_clock::now();
  const auto n = static_cast<int64_t>(structure.types.size());
  kept = Kept();
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

Model::Implementation::Input Model::Implementation::input(const Structure &structure, bool gradient,
                                                          bool virial) {
  const auto n = static_cast<int64_t>(structure.types.size());
  // Positions and strain are FP64 and rounded to the model's dtype behind the strain: so the sum
  // over atoms that makes the virial is FP64, too.
  Input result;
  result.positions = to_device(structure.positions.data(), {n, 3}, torch::kFloat64);
  auto cell = to_device(structure.cell.rows, {3, 3}, torch::kFloat64);
  const auto &kept = this->kept(structure);

  auto positions = result.positions;
  positions.requires_grad_(gradient);
  if (angstrom != 1.0) {
    positions = positions * angstrom;
    cell = cell * angstrom;
  }
  if (virial) {
    result.strain = torch::eye(3, cell.options().requires_grad(true));
    positions = positions.matmul(result.strain);
    cell = cell.matmul(result.strain);
  }
  result.system = torch::make_intrusive<metatomic_torch::SystemHolder>(
      kept.types, positions.to(dtype), cell.to(dtype), kept.periodic);

  const auto candidates = distances(kept.pairs, positions.detach(), cell.detach());
  for (size_t k = 0; k < lists.size(); k++) {
    const auto neighbors = select(candidates, requests[k]);
    auto block = torch::make_intrusive<metatensor_torch::TensorBlockHolder>(
        neighbors.vectors.to(dtype).unsqueeze(2),
        sample_labels({"first_atom", "second_atom", "cell_shift_a", "cell_shift_b", "cell_shift_c"},
                      neighbors.samples),
        components, properties);
    metatomic_torch::register_autograd_neighbors(result.system, block, check_consistency);
    result.system->add_neighbor_list(lists[k], block);
  }
  return result;
}

c10::impl::GenericDict
Model::Implementation::run(const Structure &structure, const metatomic_torch::System &system,
                           const torch::Dict<std::string, metatomic_torch::ModelOutput> &wanted) {
  const auto options = torch::make_intrusive<metatomic_torch::ModelEvaluationOptionsHolder>(
      "angstrom", wanted, kept_structures.at(&structure).selected);
  return module.forward({std::vector<metatomic_torch::System>{system}, options, check_consistency})
      .toGenericDict();
}

const std::vector<int64_t> &
Model::Implementation::atoms_of(const metatensor_torch::TensorBlock &block,
                                const Structure &structure, const std::string &what) {
  const auto atoms = block->samples()->column("atom");
  auto &kept = kept_structures.at(&structure);
  // Hardly ever different from what it was: compared on the device, it is not copied each time.
  if (kept.atoms.defined() && torch::equal(kept.atoms, atoms) &&
      block->values().size(0) == structure.owned)
    return kept.host_atoms;
  if (atoms.numel() != structure.owned || block->values().size(0) != structure.owned)
    throw std::runtime_error("the model gave " + what + " of " + std::to_string(atoms.numel()) +
                             " atoms, but was asked for " + std::to_string(structure.owned));
  const auto host = atoms.to(torch::kCPU, torch::kInt64).contiguous();
  const int64_t *data = host.data_ptr<int64_t>();
  std::vector<int64_t> indices(data, data + host.numel());
  for (const int64_t index : indices)
    if (index < 0 || index >= structure.owned)
      throw std::runtime_error("the model gave " + what + " of atom " + std::to_string(index) +
                               ", which was not asked for");
  kept.host_atoms = std::move(indices);
  kept.atoms = atoms;
  return kept.host_atoms;
}

/// Bytes that tensors have on a GPU now, and at most since the last reset.
static c10::CachingAllocator::Stat allocated(const torch::Device &device) {
  constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return at::accelerator::getDeviceStats(device.index()).allocated_bytes[all];
}

std::optional<Memory> Model::estimate_memory(const Structure &structure) {
  auto &self = *implementation_;
  constexpr int64_t sample = 500;
  const auto n = static_cast<int64_t>(structure.types.size());
  if (!self.device.is_cuda() || n < 4 * sample)
    return std::nullopt;

  // The atoms that are closest to the middle of all.
  std::array<double, 3> middle = {0.0, 0.0, 0.0};
  for (int64_t i = 0; i < 3 * n; i++)
    middle[i % 3] += structure.build_positions[i] / n;
  std::vector<std::pair<double, int64_t>> order;
  for (int64_t i = 0; i < n; i++) {
    double square = 0.0;
    for (int m = 0; m < 3; m++)
      square += std::pow(structure.build_positions[3 * i + m] - middle[m], 2);
    order.emplace_back(square, i);
  }
  std::nth_element(order.begin(), order.begin() + sample, order.end());
  Structure part;
  part.build = 1;
  part.list_cutoff = structure.list_cutoff;
  part.owned = sample;
  for (int64_t k = 0; k < sample; k++) {
    const int64_t i = order[k].second;
    part.types.push_back(structure.types[i]);
    for (int m = 0; m < 3; m++)
      part.positions.push_back(structure.build_positions[3 * i + m]);
  }
  part.build_positions = part.positions;

  const auto evaluate = [&] {
    // What an evaluation that failed left of another structure at this address.
    self.kept_structures.erase(&part);
    // A non-conservative stress needs a cell; it takes no memory.
    if (self.step) {
      PetStep probe(self.module, self.energy_key, false, -1.0);
      probe.set_lean(self.step->lean());
      const auto &kept = self.kept(part);
      probe.set_structure(kept.types, kept.pairs, part.owned);
      const auto positions = self.to_device(part.positions.data(), {sample, 3}, torch::kFloat64);
      probe.evaluate(positions * self.angstrom, torch::zeros({3, 3}, torch::kFloat64));
    } else {
      self.evaluate_whole(part, self.stress_key.empty());
    }
    self.kept_structures.erase(&part);
  };
  // The first time weights are packed, which takes memory whatever the number of atoms.
  if (self.step)
    evaluate();
  at::accelerator::resetPeakStats(self.device.index());
  const auto before = allocated(self.device);
  evaluate();
  Memory memory;
  memory.per_atom = static_cast<double>(allocated(self.device).peak - before.current) / sample;
  // What torch has reserved, but given to no tensor, can be used, too.
  const auto [free, total] = at::accelerator::getMemoryInfo(self.device.index());
  const auto stats = at::accelerator::getDeviceStats(self.device.index());
  constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  memory.free = static_cast<double>(free);
  memory.cached =
      static_cast<double>(stats.reserved_bytes[all].current - stats.allocated_bytes[all].current);
  return memory;
}

bool Model::use_less_memory() {
  auto &self = *implementation_;
  if (!self.step || !self.may_be_lean || self.step->lean())
    return false;
  self.step->set_lean(true);
  return true;
}

bool Model::is_lean() const {
  const auto &step = implementation_->step;
  return step && step->lean();
}

std::string Model::memory_use() const {
  const auto &device = implementation_->device;
  if (!device.is_cuda())
    return "";
  const auto gib = [](auto bytes) {
    std::ostringstream text;
    text << std::fixed << std::setprecision(1) << static_cast<double>(bytes) / (1 << 30);
    return text.str();
  };
  const auto [free, total] = at::accelerator::getMemoryInfo(device.index());
  // The memory of a graph is there all the time, and its tensors are not seen.
  const auto now = allocated(device);
  const auto &step = implementation_->step;
  int64_t most = now.peak;
  if (step)
    most = std::max({most, step->peak_memory(), now.current + step->graph_memory()});
  return gib(total - free) + " of " + gib(total) + " GiB of the GPU's memory in use, at most " +
         gib(most) + " GiB by the model";
}

std::vector<Pair> Model::pairs(const Structure &structure) {
  auto &self = *implementation_;
  const OnDevice on_device(self.device);
  const auto host = self.kept(structure).pairs.to(torch::kCPU).contiguous();
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

/// The six components of the virial from the gradient with respect to strain, [3,3].
static void set_virial(const torch::Tensor &by_strain, double unit, double (&virial)[6]) {
  const auto host = to_host(by_strain);
  const auto g = host.accessor<double, 2>();
  // The strain has nine components, of which three are rotations: PET is not exactly invariant.
  const int rows[6] = {0, 1, 2, 0, 0, 1};
  const int columns[6] = {0, 1, 2, 1, 2, 2};
  for (int m = 0; m < 6; m++)
    virial[m] = -0.5 * (g[rows[m]][columns[m]] + g[columns[m]][rows[m]]) * unit;
}

Prediction Model::Implementation::evaluate_step(const Structure &structure) {
  auto start = std::chrono::steady_clock::now();
  const auto n = static_cast<int64_t>(structure.types.size());
  const bool repeated = kept_structures[&structure].build == structure.build;
  copied = 0;
  const auto &kept = this->kept(structure);
  if (step_structure != &structure || step_build != structure.build) {
    step->set_structure(kept.types, kept.pairs, structure.owned);
    step_structure = &structure;
    step_build = structure.build;
  }
  auto positions = to_device(structure.positions.data(), {n, 3}, torch::kFloat64);
  auto cell = to_device(structure.cell.rows, {3, 3}, torch::kFloat64);
  if (angstrom != 1.0) {
    positions = positions * angstrom;
    cell = cell * angstrom;
  }
  stamp(start, times.input);
  if (repeated) {
    times.repeated++;
    times.repeated_atoms += n;
    times.repeated_bytes += copied;
  }
  const auto result = step->evaluate(positions, cell);
  stamp(start, times.step);

  Prediction prediction;
  const double *energies = result.energies.const_data_ptr<double>();
  for (int64_t i = 0; i < structure.owned; i++) {
    prediction.energies.push_back(energies[i] * energy_unit);
    prediction.energy += prediction.energies.back();
  }
  if (result.uncertainties.defined()) {
    const double *uncertainties = result.uncertainties.const_data_ptr<double>();
    for (int64_t i = 0; i < structure.owned; i++)
      prediction.uncertainties.push_back(uncertainties[i] * energy_unit);
  }
  const double *g = result.position_gradient.const_data_ptr<double>();
  for (int64_t i = 0; i < 3 * n; i++)
    prediction.forces.push_back(-g[i] * energy_unit * angstrom);
  set_virial(result.strain_gradient, energy_unit, prediction.virial);
  stamp(start, times.output);
  return prediction;
}

Prediction Model::Implementation::evaluate_whole(const Structure &structure, bool virial) {
  auto start = std::chrono::steady_clock::now();
  const auto n = static_cast<int64_t>(structure.types.size());
  const bool strain = virial && stress_key.empty();
  const bool gradient = strain || forces_key.empty();
  const at::AutoGradMode grad_mode(gradient);
  const bool repeated = kept_structures[&structure].build == structure.build;
  copied = 0;
  const auto input = this->input(structure, forces_key.empty(), strain);
  stamp(start, times.input);
  if (repeated) {
    times.repeated++;
    times.repeated_atoms += n;
    times.repeated_bytes += copied;
  }

  torch::Dict<std::string, metatomic_torch::ModelOutput> wanted;
  for (const auto &output : outputs)
    if (virial || output.key() != stress_key)
      wanted.insert(output.key(), output.value());
  const auto outputs = run(structure, input.system, wanted);
  stamp(start, times.forward);

  const auto block = block_of(outputs, energy_key);
  const auto values = block->values();
  std::vector<torch::Tensor> gradients(2);
  // Without a gradient the energy depends on nothing, e.g. that of an atom without neighbors.
  if (gradient && values.requires_grad()) {
    std::vector<torch::Tensor> inputs;
    if (forces_key.empty())
      inputs.push_back(input.positions);
    if (strain)
      inputs.push_back(input.strain);
    const auto found = torch::autograd::grad({values}, inputs, {torch::ones_like(values)},
                                             /*retain_graph=*/std::nullopt,
                                             /*create_graph=*/false, /*allow_unused=*/true);
    if (forces_key.empty())
      gradients[0] = found.front();
    if (strain)
      gradients[1] = found.back();
  }
  stamp(start, times.backward);

  Prediction prediction;
  const auto host_values = to_host(values);
  const double *host_energies = host_values.data_ptr<double>();
  if (atomic_energies) {
    const auto &atoms = atoms_of(block, structure, "energies");
    prediction.energies.assign(structure.owned, 0.0);
    for (int64_t i = 0; i < structure.owned; i++)
      prediction.energies[atoms[i]] += host_energies[i] * energy_unit;
  }
  for (int64_t i = 0; i < host_values.numel(); i++)
    prediction.energy += host_energies[i] * energy_unit;

  if (!uncertainty_key.empty()) {
    const auto uncertainty = block_of(outputs, uncertainty_key);
    const auto &atoms = atoms_of(uncertainty, structure, "uncertainties");
    const auto host = to_host(uncertainty->values());
    prediction.uncertainties.assign(structure.owned, 0.0);
    for (int64_t i = 0; i < structure.owned; i++)
      prediction.uncertainties[atoms[i]] = host.data_ptr<double>()[i] * energy_unit;
  }

  prediction.forces.assign(3 * n, 0.0);
  if (!forces_key.empty()) {
    const auto forces = block_of(outputs, forces_key);
    const auto &atoms = atoms_of(forces, structure, "forces");
    const auto host = to_host(forces->values().reshape({structure.owned, 3}));
    for (int64_t i = 0; i < structure.owned; i++)
      for (int m = 0; m < 3; m++)
        prediction.forces[3 * atoms[i] + m] =
            host.data_ptr<double>()[3 * i + m] * energy_unit * angstrom;
  } else if (gradients[0].defined()) {
    const auto host = to_host(gradients[0]);
    const double *g = host.data_ptr<double>();
    for (int64_t i = 0; i < 3 * n; i++)
      prediction.forces[i] = -g[i] * energy_unit;
  }

  torch::Tensor by_strain = gradients[1];
  if (virial && !stress_key.empty()) {
    const auto &rows = structure.cell.rows;
    // lower triangular
    const double volume = std::abs(rows[0][0] * rows[1][1] * rows[2][2]) * std::pow(angstrom, 3);
    by_strain = volume * to_host(block_of(outputs, stress_key)->values().reshape({3, 3}));
  }
  if (by_strain.defined())
    set_virial(by_strain, energy_unit, prediction.virial);
  stamp(start, times.output);
  return prediction;
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

std::vector<double> Model::Implementation::atomic_virials(const Structure &structure) {
  auto start = std::chrono::steady_clock::now();
  const auto n = static_cast<int64_t>(structure.types.size());
  std::vector<double> virials(9 * n, 0.0);
  if (!atomic_energies)
    throw std::runtime_error("the model has no energies of atoms, which a per-atom virial needs");

  const auto input = this->input(structure, true, false);
  stamp(start, times.input);
  torch::Dict<std::string, metatomic_torch::ModelOutput> wanted;
  wanted.insert(energy_key, outputs.at(energy_key));
  const auto outputs = run(structure, input.system, wanted);
  stamp(start, times.forward);

  const auto block = block_of(outputs, energy_key);
  const auto values = block->values();
  atoms_of(block, structure, "energies");
  if (!values.requires_grad())
    return virials;
  // Weighting the energies by positions makes one backward pass of the sum over i:
  // W_j = d/dx_j (sum of x_i U_i, x_i constant) - x_j dE/dx_j
  const auto atoms = block->samples()->column("atom").to(torch::kInt64);
  auto positions = input.positions.detach();
  positions = positions - positions.slice(0, 0, structure.owned).mean(0, true);
  const auto gradient = [&](const torch::Tensor &weights) {
    const auto found =
        torch::autograd::grad({values}, {input.positions}, {weights.to(dtype).reshape_as(values)},
                              /*retain_graph=*/true, /*create_graph=*/false,
                              /*allow_unused=*/true)[0];
    return found.defined() ? found : torch::zeros_like(positions);
  };
  const auto total = gradient(torch::ones_like(values));
  std::vector<torch::Tensor> rows;
  for (int a = 0; a < 3; a++) {
    const auto along = positions.select(1, a);
    rows.push_back(gradient(along.index_select(0, atoms)) - along.unsqueeze(1) * total);
  }
  const auto host = to_host(torch::stack(rows, 1));
  stamp(start, times.backward);

  const auto w = host.accessor<double, 3>();
  const int first[9] = {0, 1, 2, 0, 0, 1, 1, 2, 2};
  const int second[9] = {0, 1, 2, 1, 2, 2, 0, 0, 1};
  for (int64_t j = 0; j < n; j++)
    for (int m = 0; m < 9; m++)
      virials[9 * j + m] = w[j][first[m]][second[m]] * energy_unit;
  stamp(start, times.output);
  return virials;
}

} // namespace metatomic_tc::lammps
