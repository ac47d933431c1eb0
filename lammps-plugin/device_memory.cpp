// SPDX-License-Identifier: GPL-2.0-or-later

#include "model_implementation.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iomanip>
#include <sstream>

#include <ATen/DeviceAccelerator.h>

namespace metatomic_tc::lammps {

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
    // A non-conservative stress needs a cell; it takes no memory.
    if (self.step) {
      PetStep probe(self.module, self.energy_key, false, -1.0);
      probe.set_lean(self.step->lean());
      const auto &kept = self.on_device(part);
      probe.set_structure(kept.types, kept.pairs, part.owned);
      const auto positions = self.to_device(part.positions.data(), {sample, 3}, torch::kFloat64);
      probe.evaluate(positions * self.angstrom, torch::zeros({3, 3}, torch::kFloat64));
    } else {
      self.evaluate_whole(part, self.stress_key.empty());
    }
    part.on_device.reset();
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

} // namespace metatomic_tc::lammps
