// SPDX-License-Identifier: GPL-2.0-or-later

#include "model_implementation.h"

#include <cmath>
#include <stdexcept>

namespace metatomic_tc::lammps {

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

Model::Implementation::Input Model::Implementation::input(const Structure &structure, bool gradient,
                                                          bool virial) {
  const auto n = static_cast<int64_t>(structure.types.size());
  // Positions and strain are FP64 and rounded to the model's dtype behind the strain: so the sum
  // over atoms that makes the virial is FP64, too.
  Input result;
  result.positions = to_device(structure.positions.data(), {n, 3}, torch::kFloat64);
  auto cell = to_device(structure.cell.rows, {3, 3}, torch::kFloat64);
  const auto &kept = on_device(structure);

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
      "angstrom", wanted, on_device(structure).selected);
  return module.forward({std::vector<metatomic_torch::System>{system}, options, check_consistency})
      .toGenericDict();
}

const std::vector<int64_t> &
Model::Implementation::atoms_of(const metatensor_torch::TensorBlock &block,
                                const Structure &structure, const std::string &what) {
  const auto atoms = block->samples()->column("atom");
  auto &kept = on_device(structure);
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

Prediction Model::Implementation::evaluate_whole(const Structure &structure, bool virial) {
  auto start = std::chrono::steady_clock::now();
  const auto n = static_cast<int64_t>(structure.types.size());
  const bool strain = virial && stress_key.empty();
  const bool gradient = strain || forces_key.empty();
  const at::AutoGradMode grad_mode(gradient);
  const bool repeated = is_on_device(structure);
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
