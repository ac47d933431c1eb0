// SPDX-License-Identifier: GPL-2.0-or-later

#include "model.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <stdexcept>

#include <c10/core/DeviceGuard.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/script.h>
#include <torch/version.h>

#include <metatensor/torch.hpp>
#include <metatomic/torch.hpp>

#include "metatomic_tc/convert.hpp"
#include "metatomic_tc/linear.hpp"
#include "metatomic_tc/modes.hpp"

namespace metatomic_tc::lammps {

// ---- messages
// ------------------------------------------------------------------------------------

std::string one_line(const std::exception &error) {
  std::string text = error.what();
  if (const auto *torch_error = dynamic_cast<const c10::Error *>(&error))
    text = torch_error->what_without_backtrace();

  // TorchScript: a trace of the model's code, and at its end the exception that matters.
  for (const char *marker : {"RuntimeError: ", "torch.jit.Error: ", "builtins."}) {
    const auto position = text.rfind(marker);
    if (position != std::string::npos)
      text = text.substr(position + std::string(marker).size());
  }
  const auto trace = text.find("\nException raised from");
  if (trace != std::string::npos)
    text = text.substr(0, trace);

  std::istringstream words(text);
  std::string line;
  for (std::string word; words >> word;)
    line += (line.empty() ? "" : " ") + word;
  return line.empty() ? "unknown error" : line;
}

void check_mode(const std::string &mode) {
  parse_mode(mode);
}

static std::string join(const std::vector<int64_t> &numbers) {
  std::string text;
  for (const auto number : numbers) {
    text += text.empty() ? "" : " ";
    text += std::to_string(number);
  }
  return text;
}

/// Tells apart what users give instead of an exported model.
static void check_file(const std::string &path) {
  const std::string export_it =
      "; give the .pt file that \"metatomic-tc export\" or \"mtt export\" "
      "wrote";
  if (std::filesystem::is_directory(path))
    throw std::runtime_error(path + " is a directory, not a model" + export_it);
  std::ifstream file(path, std::ios::binary);
  if (!file.good())
    throw std::runtime_error("cannot read the model file " + path +
                             ": it was looked for from the current directory and in those of "
                             "LAMMPS_POTENTIALS");
  std::string start(2, '\0');
  file.read(start.data(), 2);
  file.close();

  const auto ends_with = [&](const std::string &end) {
    return path.size() >= end.size() &&
           path.compare(path.size() - end.size(), end.size(), end) == 0;
  };
  const std::string is_checkpoint =
      path + " is a checkpoint, not an exported model: run \"metatomic-tc export " + path +
      "\" and use the .pt file it writes";
  if (ends_with(".ckpt"))
    throw std::runtime_error(is_checkpoint);

  std::optional<caffe2::serialize::PyTorchStreamReader> archive;
  try {
    archive.emplace(path);
  } catch (const std::exception &) {
    if (start == "PK")
      throw std::runtime_error(path + " is not a metatomic model: it is a damaged or incomplete "
                                      "archive; copy or download the file again");
    throw std::runtime_error(path +
                             " is not a metatomic model: it is not a TorchScript file at "
                             "all" +
                             export_it);
  }
  if (!archive->hasRecord("constants.pkl")) {
    if (archive->hasRecord("data.pkl"))
      throw std::runtime_error(is_checkpoint);
    throw std::runtime_error(path +
                             " is not a metatomic model: it is an archive without a "
                             "TorchScript module in it" +
                             export_it);
  }
  if (!archive->hasRecord("extra/metatomic-version")) {
    if (archive->hasRecord("extra/metatensor-version"))
      throw std::runtime_error(path +
                               " is a model for metatensor, from before metatomic: export it "
                               "again from its checkpoint, with \"metatomic-tc export\"");
    throw std::runtime_error(path + " is not a metatomic model: it is a TorchScript file that was "
                                    "not written by metatomic's AtomisticModel.save");
  }
}

/// metatensor warns about files written by its older versions, on every rank; whoever runs a model
/// can do nothing about it.
class NoWarnings : public c10::WarningHandler {
  void process(const c10::Warning &) override {}
};

// ---- Model
// ---------------------------------------------------------------------------------------

struct Model::Implementation {
  Implementation(metatensor_torch::Module loaded) : module(std::move(loaded)) {}

  metatensor_torch::Module module;
  metatomic_torch::ModelCapabilities capabilities;
  std::vector<metatomic_torch::NeighborListOptions> lists;
  std::vector<NeighborRequest> requests;
  /// Of the structure with this number of its build, on the device: types and `Structure::pairs`.
  int64_t build = 0;
  torch::Tensor types, pairs;
  double interaction_range = 0.0;
  std::string energy_key;
  bool atomic_energies = false;
  torch::Device device = torch::kCPU;
  torch::Dtype dtype = torch::kFloat32;
  bool check_consistency = false;
  std::string length_unit;
  torch::Dict<std::string, metatomic_torch::ModelOutput> outputs;
  std::string summary;
  std::vector<std::string> warnings;

  metatensor_torch::Labels sample_labels(const std::vector<std::string> &names,
                                         torch::Tensor values) const {
    return torch::make_intrusive<metatensor_torch::LabelsHolder>(names, values.to(device),
                                                                 metatensor::assume_unique{});
  }
};

Model::Model(const std::string &path, const ModelOptions &options, const LocalRank &local) {
  check_file(path);

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
  self.length_unit = options.length_unit;
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
  try {
    self.energy_key = metatomic_torch::pick_output("energy", available);
  } catch (const std::exception &error) {
    throw std::runtime_error(path + " has no energy: " + one_line(error));
  }
  self.atomic_energies = available.at(self.energy_key)->sample_kind() == "atom";
  self.outputs.insert(self.energy_key,
                      torch::make_intrusive<metatomic_torch::ModelOutputHolder>(
                          "", options.energy_unit, self.atomic_energies ? "atom" : "system",
                          std::vector<std::string>(), ""));

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
        {self.lists.back()->engine_cutoff(options.length_unit), self.lists.back()->full_list()});
  }
  self.interaction_range = self.capabilities->engine_interaction_range(options.length_unit);

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
  const Mode asked = parse_mode(options.mode);
  const Mode mode = resolve_mode(asked, on, options.fallback);

  // Before the first run: TorchScript compiles what it sees then.
  const ConversionReport report = convert_linear_layers(self.module, mode);
  NoWarnings no_warnings;
  {
    c10::WarningUtils::WarningHandlerGuard guard(&no_warnings);
    self.module.to(self.device);
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
  self.summary = summary.str();
}

Model::~Model() = default;

const std::vector<NeighborRequest> &Model::neighbor_requests() const {
  return implementation_->requests;
}

double Model::cutoff() const {
  double cutoff = 0.0;
  for (const auto &request : implementation_->requests)
    cutoff = std::max(cutoff, request.cutoff);
  return cutoff;
}

double Model::interaction_range() const {
  return implementation_->interaction_range;
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

Prediction Model::evaluate(const Structure &structure, bool virial) {
  auto &self = *implementation_;
  std::optional<c10::DeviceGuard> device_guard;
  std::optional<torch::jit::GraphOptimizerEnabledGuard> optimizer_guard;
  if (self.device.is_cuda()) {
    device_guard.emplace(self.device);
  } else {
    // On the CPU TorchScript has nothing to fuse: its optimizer takes three seconds of the first
    // steps and then gains nothing.
    optimizer_guard.emplace(false);
  }

  const auto n = static_cast<int64_t>(structure.types.size());
  const auto on_device = [&](const void *data, at::IntArrayRef shape, torch::Dtype dtype) {
    // Tensors on the CPU share the memory of `structure`, which outlives them and which none
    // writes.
    return torch::from_blob(const_cast<void *>(data), shape, dtype).to(self.device);
  };

  // Positions and strain are FP64 and rounded to the model's dtype behind the strain: so the sum
  // over atoms that makes the virial is FP64, too.
  auto positions = on_device(structure.positions.data(), {n, 3}, torch::kFloat64);
  auto cell = on_device(structure.cell.rows, {3, 3}, torch::kFloat64);
  positions.requires_grad_(true);
  std::vector<torch::Tensor> inputs = {positions};
  auto strained_positions = positions;
  auto strained_cell = cell;
  if (virial) {
    auto strain = torch::eye(3, positions.options().requires_grad(true));
    strained_positions = positions.matmul(strain);
    strained_cell = cell.matmul(strain);
    inputs.push_back(strain);
  }

  if (self.build != structure.build) {
    const auto count = static_cast<int64_t>(structure.pairs.size());
    static_assert(sizeof(Pair) == 5 * sizeof(int32_t));
    self.types = on_device(structure.types.data(), {n}, torch::kInt32).clone();
    self.pairs = on_device(structure.pairs.data(), {count, 5}, torch::kInt32).clone();
    self.build = structure.build;
  }

  const auto system = torch::make_intrusive<metatomic_torch::SystemHolder>(
      self.types, strained_positions.to(self.dtype), strained_cell.to(self.dtype),
      on_device(structure.cell.periodic, {3}, torch::kBool));

  const auto components = std::vector<metatensor_torch::Labels>{
      self.sample_labels({"xyz"}, torch::arange(3, torch::kInt32).reshape({3, 1}))};
  const auto properties = self.sample_labels({"distance"}, torch::zeros({1, 1}, torch::kInt32));
  const auto candidates = distances(self.pairs, positions.detach(), cell);
  for (size_t k = 0; k < self.lists.size(); k++) {
    const auto neighbors = select(candidates, self.requests[k]);
    auto block = torch::make_intrusive<metatensor_torch::TensorBlockHolder>(
        neighbors.vectors.to(self.dtype).unsqueeze(2),
        self.sample_labels(
            {"first_atom", "second_atom", "cell_shift_a", "cell_shift_b", "cell_shift_c"},
            neighbors.samples),
        components, properties);
    metatomic_torch::register_autograd_neighbors(system, block, self.check_consistency);
    system->add_neighbor_list(self.lists[k], block);
  }

  torch::optional<metatensor_torch::Labels> selected;
  if (structure.owned < n) {
    auto values = torch::zeros({structure.owned, 2}, torch::kInt32);
    values.select(1, 1).copy_(torch::arange(structure.owned, torch::kInt32));
    selected = self.sample_labels({"system", "atom"}, values);
  }
  const auto options = torch::make_intrusive<metatomic_torch::ModelEvaluationOptionsHolder>(
      self.length_unit, self.outputs, selected);

  const auto outputs =
      self.module
          .forward({std::vector<metatomic_torch::System>{system}, options, self.check_consistency})
          .toGenericDict();
  const auto energy =
      outputs.at(self.energy_key).toCustomClass<metatensor_torch::TensorMapHolder>();
  const auto block = metatensor_torch::TensorMapHolder::block_by_id(energy, 0);
  const auto values = block->values();

  Prediction prediction;
  const auto to_host = [](const torch::Tensor &tensor) {
    return tensor.detach().to(torch::kCPU, torch::kFloat64).contiguous();
  };
  const auto host_values = to_host(values);
  const double *host_energies = host_values.data_ptr<double>();
  if (self.atomic_energies) {
    if (values.numel() != structure.owned)
      throw std::runtime_error("the model gave " + std::to_string(values.numel()) +
                               " energies for " + std::to_string(structure.owned) + " atoms");
    const auto atoms = block->samples()->column("atom").to(torch::kCPU, torch::kInt64).contiguous();
    const int64_t *index = atoms.data_ptr<int64_t>();
    prediction.energies.assign(structure.owned, 0.0);
    for (int64_t i = 0; i < structure.owned; i++) {
      if (index[i] < 0 || index[i] >= structure.owned)
        throw std::runtime_error("the model gave an energy for atom " + std::to_string(index[i]) +
                                 ", which was not asked for");
      prediction.energies[index[i]] += host_energies[i];
    }
  }
  for (int64_t i = 0; i < host_values.numel(); i++)
    prediction.energy += host_energies[i];

  prediction.forces.assign(3 * n, 0.0);
  // Without a gradient the energy depends on nothing, e.g. that of an atom without neighbors.
  if (!values.requires_grad())
    return prediction;
  const auto gradients = torch::autograd::grad({values}, inputs, {torch::ones_like(values)},
                                               /*retain_graph=*/std::nullopt,
                                               /*create_graph=*/false, /*allow_unused=*/true);
  if (gradients[0].defined()) {
    const auto gradient = to_host(gradients[0]);
    const double *g = gradient.data_ptr<double>();
    for (int64_t i = 0; i < 3 * n; i++)
      prediction.forces[i] = -g[i];
  }
  if (virial && gradients[1].defined()) {
    const auto gradient = to_host(gradients[1]);
    const auto g = gradient.accessor<double, 2>();
    // The strain has nine components, of which three are rotations: PET is not exactly invariant.
    const int rows[6] = {0, 1, 2, 0, 0, 1};
    const int columns[6] = {0, 1, 2, 1, 2, 2};
    for (int m = 0; m < 6; m++)
      prediction.virial[m] = -0.5 * (g[rows[m]][columns[m]] + g[columns[m]][rows[m]]);
  }
  return prediction;
}

} // namespace metatomic_tc::lammps
