// SPDX-License-Identifier: GPL-2.0-or-later

#include "device.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include <ATen/Parallel.h>
#include <torch/cuda.h>

namespace metatomic_tc::lammps {

/// The first of `names` that the environment has as a number, or -1.
static int from_environment(std::initializer_list<const char *> names) {
  for (const char *name : names) {
    const char *value = std::getenv(name);
    if (value && *value) {
      char *end = nullptr;
      const long number = std::strtol(value, &end, 10);
      if (*end == '\0' && number >= 0)
        return static_cast<int>(number);
    }
  }
  return -1;
}

LocalRank local_rank(int rank, int size) {
  LocalRank local;
  local.index = from_environment({"MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK",
                                  "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"});
  local.count = from_environment(
      {"MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"});
  if (local.index < 0)
    local.index = rank;
  if (local.count < 1)
    local.count = size;
  return local;
}

std::string select_device(const std::string &requested, const std::vector<std::string> &supported,
                          const LocalRank &local) {
  const auto supports = [&](const char *name) {
    return std::find(supported.begin(), supported.end(), name) != supported.end();
  };
  const int gpus = torch::cuda::is_available() ? static_cast<int>(torch::cuda::device_count()) : 0;

  std::string device = requested;
  if (device.empty())
    device = gpus > 0 && supports("cuda") ? "cuda" : "cpu";

  const std::string type = device.substr(0, device.find(':'));
  if (!supports(type.c_str())) {
    std::string names;
    for (const auto &name : supported)
      names += (names.empty() ? "" : ", ") + name;
    throw std::runtime_error("the model does not run on device " + type + ", only on: " + names);
  }
  if (type == "cpu")
    return "cpu";
  if (gpus == 0)
    throw std::runtime_error(
        "device " + device +
        " was asked for, but torch finds no CUDA GPU here; use device cpu, or "
        "check the driver, CUDA_VISIBLE_DEVICES and that torch is a CUDA build");
  if (device == "cuda")
    return "cuda:" + std::to_string(local.index % gpus);
  // "device" has the form cuda:N, checked where the keyword was read.
  if (std::atoi(device.c_str() + 5) >= gpus)
    throw std::runtime_error("device " + device + " was asked for, but there are only " +
                             std::to_string(gpus) + " GPUs here, numbered from 0");
  return device;
}

void set_cpu_threads(const LocalRank &local) {
  if (std::getenv("OMP_NUM_THREADS"))
    return;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  at::set_num_threads(std::max(1, cores / std::max(1, local.count)));
}

} // namespace metatomic_tc::lammps
