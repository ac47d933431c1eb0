// SPDX-License-Identifier: GPL-2.0-or-later

#include "model_implementation.h"

namespace metatomic_tc::lammps {

Prediction Model::Implementation::evaluate_step(const Structure &structure) {
  auto start = std::chrono::steady_clock::now();
  const auto n = static_cast<int64_t>(structure.types.size());
  const bool repeated = is_on_device(structure);
  copied = 0;
  const auto &kept = on_device(structure);
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

} // namespace metatomic_tc::lammps
