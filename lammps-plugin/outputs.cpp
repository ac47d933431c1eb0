// SPDX-License-Identifier: GPL-2.0-or-later

#include "messages.h"
#include "model_implementation.h"

#include <optional>
#include <stdexcept>

namespace metatomic_tc::lammps {

std::string Model::Implementation::pick(const std::string &name,
                                        const ModelOptions &options) const {
  std::optional<std::string> variant;
  for (const std::string &key : {std::string(), name})
    if (const auto found = options.variants.find(key); found != options.variants.end())
      variant = found->second.empty() ? std::nullopt : std::make_optional(found->second);
  return metatomic_torch::pick_output(name, capabilities->outputs(), variant);
}

void Model::Implementation::request(const std::string &key, const std::string &unit,
                                    const std::string &sample_kind) {
  outputs.insert(key, torch::make_intrusive<metatomic_torch::ModelOutputHolder>(
                          "", unit, sample_kind, std::vector<std::string>(), ""));
}

void Model::Implementation::choose_outputs(const std::string &path, const ModelOptions &options) {
  const auto available = capabilities->outputs();
  std::string has_outputs;
  for (const auto &output : available)
    has_outputs += (has_outputs.empty() ? "; the outputs of the model are " : ", ") + output.key();
  try {
    energy_key = pick("energy", options);
  } catch (const std::exception &error) {
    throw std::runtime_error(path + " has no such energy: " + one_line(error) + has_outputs);
  }
  atomic_energies = available.at(energy_key)->sample_kind() == "atom";
  request(energy_key, "eV", atomic_energies ? "atom" : "system");

  if (options.uncertainty) {
    std::string problem = "its uncertainty is not one of atoms";
    try {
      uncertainty_key = pick("energy_uncertainty", options);
    } catch (const std::exception &error) {
      problem = one_line(error);
    }
    if (!uncertainty_key.empty() && available.at(uncertainty_key)->sample_kind() != "atom")
      uncertainty_key.clear();
    const bool demanded =
        options.uncertainty_threshold.has_value() || options.variants.count("energy_uncertainty");
    if (uncertainty_key.empty() && demanded)
      throw std::runtime_error(path + " has no such uncertainty of the energies of atoms, which " +
                               "uncertainty_threshold needs: " + problem + has_outputs);
    if (!uncertainty_key.empty()) {
      uncertainty_threshold = options.uncertainty_threshold.value_or(0.1 * energy_unit);
      request(uncertainty_key, "eV", "atom");
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
        const auto key = pick(name, with_name);
        request(key, unit, sample_kind);
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
    forces_key = direct("force", "eV/angstrom", "atom");
  if (options.direct_stress)
    stress_key = direct("stress", "eV/angstrom^3", "system");
}

} // namespace metatomic_tc::lammps
