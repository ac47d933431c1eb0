#include "metatomic_tc/dispatch.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace metatomic_tc {

namespace {

constexpr int any_newer = std::numeric_limits<int>::max();

std::string join(const std::vector<Mode> &modes) {
    auto result = std::string();
    for (auto mode : modes) {
        result += (result.empty() ? "" : ", ") + to_string(mode);
    }
    return result;
}

bool covers(const DispatchRule &rule, Mode mode, const Hardware &hardware) {
    return rule.mode == mode && rule.cuda == hardware.cuda &&
           rule.min_compute_capability <= hardware.compute_capability &&
           hardware.compute_capability <= rule.max_compute_capability &&
           rule.min_cuda_version <= hardware.cuda_version;
}

} // namespace

const std::vector<DispatchRule> &dispatch_table() {
    using I = Implementation;
    // A 128 x 64 tile uses its warps better, but only once there are two for each multiprocessor
    // (an H200 has 132); below that the 64 x 64 tile keeps twice as many of them busy. Slicing K
    // costs a fifth of the speed, and keeps long sums of one sign at the accuracy of native FP32.
    // Sums of up to 64 products average too little over the errors of two slices to be as accurate
    // as native FP32. BF16x6, which is, also has the exponents of TF32, but not those of FP16x3.
    static const std::vector<DispatchRule> table = {
        // mode, CUDA, compute capability from, to, CUDA version from, tiles from, K from,
        // implementation
        {Mode::fp32, false, 0, 0, 0, 0, 0, I::cpu_fp32},
        {Mode::tf32, false, 0, 0, 0, 0, 0, I::cpu_emulated},
        {Mode::tf32x3, false, 0, 0, 0, 0, 0, I::cpu_emulated},
        {Mode::fp16x3, false, 0, 0, 0, 0, 0, I::cpu_emulated},
        {Mode::bf16x6, false, 0, 0, 0, 0, 0, I::cpu_emulated},
        {Mode::bf16x9, false, 0, 0, 0, 0, 0, I::cpu_emulated},
        {Mode::bf16x9_eager, false, 0, 0, 0, 0, 0, I::cpu_emulated},
        {Mode::fp32, true, 0, any_newer, 0, 0, 0, I::cublas_fp32},
        {Mode::tf32, true, 80, any_newer, 0, 0, 0, I::cublas_tf32},
        {Mode::tf32x3, true, 90, 90, 0, 0, 65, I::wgmma_tf32x3},
        {Mode::tf32x3, true, 90, 90, 0, 0, 0, I::wgmma_bf16x6},
        {Mode::fp16x3, true, 90, 90, 0, 0, 65, I::wgmma_fp16x3},
        {Mode::fp16x3, true, 90, 90, 0, 0, 0, I::cublas_fp32},
        {Mode::bf16x6, true, 90, 90, 0, 0, 0, I::wgmma_bf16x6},
        {Mode::bf16x9, true, 90, 90, 0, 0, 0, I::wgmma_bf16x9},
        {Mode::bf16x9_eager, true, 90, 90, 0, 0, 0, I::wgmma_bf16x9},
        {Mode::tf32x3, true, 80, any_newer, 0, 264, 1025, I::cutlass_3xtf32_128x64_sliced_k},
        {Mode::tf32x3, true, 80, any_newer, 0, 264, 0, I::cutlass_3xtf32_128x64},
        {Mode::tf32x3, true, 80, any_newer, 0, 0, 0, I::cutlass_3xtf32_64x64_sliced_k},
        {Mode::bf16x6, true, 80, 89, 0, 264, 0, I::mma_bf16x6_128x64},
        {Mode::bf16x6, true, 80, 89, 0, 0, 0, I::mma_bf16x6_64x64},
        {Mode::bf16x6, true, 120, 129, 0, 264, 0, I::mma_bf16x6_128x64},
        {Mode::bf16x6, true, 120, 129, 0, 0, 0, I::mma_bf16x6_64x64},
        {Mode::bf16x9, true, 80, 89, 0, 264, 0, I::mma_bf16x9_128x64},
        {Mode::bf16x9, true, 80, 89, 0, 0, 0, I::mma_bf16x9_64x64},
        {Mode::bf16x9, true, 120, 129, 0, 264, 0, I::mma_bf16x9_128x64},
        {Mode::bf16x9, true, 120, 129, 0, 0, 0, I::mma_bf16x9_64x64},
        {Mode::bf16x9, true, 100, 100, 12090, 0, 0, I::cublas_bf16x9_performant},
        {Mode::bf16x9, true, 103, 103, 12090, 0, 0, I::cublas_bf16x9_performant},
        {Mode::bf16x9_eager, true, 100, 100, 12090, 0, 0, I::cublas_bf16x9_eager},
        {Mode::bf16x9_eager, true, 103, 103, 12090, 0, 0, I::cublas_bf16x9_eager},
    };
    return table;
}

std::string to_string(Implementation implementation) {
    switch (implementation) {
    case Implementation::cpu_fp32:
        return "cpu-fp32";
    case Implementation::cpu_emulated:
        return "cpu-emulated";
    case Implementation::cublas_fp32:
        return "cublas-fp32";
    case Implementation::cublas_tf32:
        return "cublas-tf32";
    case Implementation::cublas_bf16x9_performant:
        return "cublas-bf16x9-performant";
    case Implementation::cublas_bf16x9_eager:
        return "cublas-bf16x9-eager";
    case Implementation::cutlass_3xtf32_128x64:
        return "cutlass-3xtf32-128x64";
    case Implementation::cutlass_3xtf32_128x64_sliced_k:
        return "cutlass-3xtf32-128x64-sliced-k";
    case Implementation::cutlass_3xtf32_64x64_sliced_k:
        return "cutlass-3xtf32-64x64-sliced-k";
    case Implementation::wgmma_tf32x3:
        return "wgmma-tf32x3";
    case Implementation::wgmma_fp16x3:
        return "wgmma-fp16x3";
    case Implementation::wgmma_bf16x6:
        return "wgmma-bf16x6";
    case Implementation::wgmma_bf16x9:
        return "wgmma-bf16x9";
    case Implementation::mma_bf16x6_128x64:
        return "mma-bf16x6-128x64";
    case Implementation::mma_bf16x6_64x64:
        return "mma-bf16x6-64x64";
    case Implementation::mma_bf16x9_128x64:
        return "mma-bf16x9-128x64";
    case Implementation::mma_bf16x9_64x64:
        return "mma-bf16x9-64x64";
    }
    throw std::logic_error("This value of metatomic_tc::Implementation has no name.");
}

Implementation parse_implementation(const std::string &name) {
    for (const auto &rule : dispatch_table()) {
        if (to_string(rule.implementation) == name) {
            return rule.implementation;
        }
    }
    throw std::invalid_argument(
        "Found '" + name +
        "', but this is no implementation; `metatomic-tc info` prints the table that names them."
    );
}

std::string Hardware::description() const {
    if (!cuda) {
        return name;
    }
    auto dotted = [](int major, int minor) {
        return std::to_string(major) + "." + std::to_string(minor);
    };
    return name + " (compute capability " +
           dotted(compute_capability / 10, compute_capability % 10) + ", CUDA " +
           dotted(cuda_version / 1000, cuda_version % 1000 / 10) + ")";
}

bool stays_fp32(int64_t in_features, int64_t out_features) {
    return std::min(in_features, out_features) < minimum_features;
}

bool attention_on_tensor_cores(Mode mode, const Hardware &hardware, int64_t head_size) {
    auto fits = mode == Mode::tf32x3 || mode == Mode::fp16x3 || mode == Mode::bf16x6;
    return fits && hardware.cuda && hardware.compute_capability >= 80 &&
           (head_size == 16 || head_size == 32);
}

Implementation
select_implementation(Mode mode, const Hardware &hardware, int64_t M, int64_t N, int64_t K) {
    auto tiles = ((M + 127) / 128) * ((N + 63) / 64);
    auto supported = false;
    for (const auto &rule : dispatch_table()) {
        if (covers(rule, mode, hardware)) {
            supported = true;
            if (tiles >= rule.min_tiles && K >= rule.min_k &&
                !(stays_fp32(K, N) && mode != Mode::fp32)) {
                return rule.implementation;
            }
        }
    }
    if (supported) {
        return select_implementation(Mode::fp32, hardware, M, N, K);
    }
    throw std::runtime_error(
        "The mode " + to_string(mode) + " does not run on " + hardware.description() +
        "; the modes that do are: " + join(supported_modes(hardware)) + "."
    );
}

std::vector<Mode> supported_modes(const Hardware &hardware) {
    auto result = std::vector<Mode>();
    for (auto mode : all_modes()) {
        const auto &table = dispatch_table();
        if (std::any_of(table.begin(), table.end(), [&](const auto &rule) {
                return covers(rule, mode, hardware);
            })) {
            result.push_back(mode);
        }
    }
    return result;
}

Mode resolve_mode(Mode mode, const Hardware &hardware, bool fallback) {
    auto modes = supported_modes(hardware);
    if (fallback && std::find(modes.begin(), modes.end(), mode) == modes.end()) {
        return Mode::fp32;
    }
    select_implementation(mode, hardware, 1, 1, 1);
    return mode;
}

} // namespace metatomic_tc
