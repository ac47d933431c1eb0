#pragma once

#include <string>
#include <vector>

#include "metatomic_tc/modes.hpp"

namespace metatomic_tc {

/// What a linear layer runs on, as far as the choice of a kernel depends on it.
struct Hardware {
    /// true for a CUDA device, false for the CPU.
    bool cuda = false;
    /// 10·major + minor, e.g. 90 for an H200; 0 on the CPU.
    int compute_capability = 0;
    /// CUDA version of cuBLAS in this process, 1000·major + 10·minor, e.g. 13000; 0 on the CPU.
    int cuda_version = 0;
    /// Multiprocessors, e.g. 132 for an H200; 0 on the CPU.
    int multiprocessors = 0;
    /// e.g. "NVIDIA H200", or "CPU".
    std::string name = "CPU";
    /// 32 hexadecimal digits, the same for the same GPU in every process; "" on the CPU.
    std::string uuid;

    /// "CPU", or e.g. "NVIDIA H200 (compute capability 9.0, CUDA 13.0)".
    std::string description() const;
};

/// The modes that `hardware` has kernels for.
std::vector<Mode> supported_modes(const Hardware &hardware);

/// The mode to use when `mode` was asked for: `mode` itself where `hardware` supports it, else
/// `fp32` if `fallback` is true.
/// @throws std::runtime_error when `hardware` does not support `mode` and `fallback` is false; the
///         message names the modes that it does
Mode resolve_mode(Mode mode, const Hardware &hardware, bool fallback);

} // namespace metatomic_tc
