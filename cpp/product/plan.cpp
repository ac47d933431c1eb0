#include "plan.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "wgmma/layout.hpp"

namespace metatomic_tc {

namespace {

constexpr int any_newer = std::numeric_limits<int>::max();

struct KernelName {
    Kernel kernel;
    Family family;
    const char *name;
};

constexpr KernelName kernel_names[] = {
    {Kernel::cpu_fp32, Family::cpu, "cpu-fp32"},
    {Kernel::cpu_emulated, Family::cpu, "cpu-emulated"},
    {Kernel::cublas_fp32, Family::cublas, "cublas-fp32"},
    {Kernel::cublas_tf32, Family::cublas, "cublas-tf32"},
    {Kernel::cublas_bf16x9_performant, Family::cublas, "cublas-bf16x9-performant"},
    {Kernel::cublas_bf16x9_eager, Family::cublas, "cublas-bf16x9-eager"},
    {Kernel::cutlass_3xtf32_128x64, Family::cutlass, "cutlass-3xtf32-128x64"},
    {Kernel::cutlass_3xtf32_128x64_sliced_k, Family::cutlass, "cutlass-3xtf32-128x64-sliced-k"},
    {Kernel::cutlass_3xtf32_64x64_sliced_k, Family::cutlass, "cutlass-3xtf32-64x64-sliced-k"},
    {Kernel::cutlass_3xtf32_64x64_sliced_k_unaligned,
     Family::cutlass,
     "cutlass-3xtf32-64x64-sliced-k-unaligned"},
    {Kernel::mma_bf16x6_128x64, Family::mma, "mma-bf16x6-128x64"},
    {Kernel::mma_bf16x6_64x64, Family::mma, "mma-bf16x6-64x64"},
    {Kernel::mma_bf16x6_64x64_unaligned, Family::mma, "mma-bf16x6-64x64-unaligned"},
    {Kernel::mma_bf16x9_128x64, Family::mma, "mma-bf16x9-128x64"},
    {Kernel::mma_bf16x9_64x64, Family::mma, "mma-bf16x9-64x64"},
    {Kernel::mma_bf16x9_64x64_unaligned, Family::mma, "mma-bf16x9-64x64-unaligned"},
    {Kernel::wgmma_tf32x3, Family::wgmma, "wgmma-tf32x3"},
    {Kernel::wgmma_tf32x3_two_parts, Family::wgmma, "wgmma-tf32x3-two-parts"},
    {Kernel::wgmma_fp16x3, Family::wgmma, "wgmma-fp16x3"},
    {Kernel::wgmma_fp16x3_shared_slices, Family::wgmma, "wgmma-fp16x3-shared-slices"},
    {Kernel::wgmma_bf16x6, Family::wgmma, "wgmma-bf16x6"},
    {Kernel::wgmma_bf16x6_two_parts, Family::wgmma, "wgmma-bf16x6-two-parts"},
    {Kernel::wgmma_bf16x9, Family::wgmma, "wgmma-bf16x9"},
    {Kernel::wgmma_bf16x9_two_parts, Family::wgmma, "wgmma-bf16x9-two-parts"},
};

const KernelName &named(Kernel kernel) {
    for (const auto &entry : kernel_names) {
        if (entry.kernel == kernel) {
            return entry;
        }
    }
    throw std::logic_error("This value of metatomic_tc::Kernel has no name.");
}

std::string join(const std::vector<Mode> &modes) {
    auto result = std::string();
    for (auto mode : modes) {
        result += (result.empty() ? "" : ", ") + to_string(mode);
    }
    return result;
}

bool covers(const KernelRule &rule, Mode mode, const Hardware &hardware) {
    return rule.mode == mode && rule.cuda == hardware.cuda &&
           rule.min_compute_capability <= hardware.compute_capability &&
           hardware.compute_capability <= rule.max_compute_capability &&
           rule.min_cuda_version <= hardware.cuda_version;
}

bool is_aligned(const Problem &problem) {
    return problem.K % 4 == 0 && problem.N % 4 == 0 && problem.aligned_a &&
           problem.aligned_weight && problem.aligned_bias;
}

bool fits(const KernelRule &rule, const Problem &problem, const Hardware &hardware) {
    auto rows_of_tiles = (problem.M + 127) / 128;
    return (is_aligned(problem) || !rule.aligned) &&
           (rows_of_tiles >= hardware.multiprocessors || !rule.fills_multiprocessors) &&
           rows_of_tiles * ((problem.N + 63) / 64) >= rule.min_tiles && problem.K >= rule.min_k;
}

Kernel kernel_for(const Problem &problem, Mode mode, const Hardware &hardware) {
    auto supported = false;
    for (const auto &rule : kernel_table()) {
        if (covers(rule, mode, hardware)) {
            supported = true;
            if (fits(rule, problem, hardware) &&
                (mode == Mode::fp32 || !stays_fp32(problem.K, problem.N))) {
                return rule.kernel;
            }
        }
    }
    if (supported) {
        return kernel_for(problem, Mode::fp32, hardware);
    }
    throw std::runtime_error(
        "The mode " + to_string(mode) + " does not run on " + hardware.description() +
        "; the modes that do are: " + join(supported_modes(hardware)) + "."
    );
}

/// What follows from the kernel.
Plan complete(Kernel kernel, const Problem &problem, const Hardware &hardware) {
    auto result = Plan();
    result.problem = problem;
    result.kernel = kernel;
    switch (family_of(kernel)) {
    case Family::cpu:
        break;
    case Family::cublas:
        // NVIDIA's recommendation for compute capability 9.0 and newer, and more than enough below
        result.workspace_size = 32 << 20;
        break;
    case Family::cutlass:
    case Family::mma:
        // the flag that says whether an output is Inf or NaN
        result.workspace_size = 256;
        break;
    case Family::wgmma:
        result.fuses_activation = problem.activation != Activation::none;
        result.multiprocessors = hardware.multiprocessors;
        wgmma::choose_tiling(result);
        break;
    }
    return result;
}

} // namespace

const std::vector<KernelRule> &kernel_table() {
    using K = Kernel;
    constexpr auto yes = true, no = false;
    // A 128 x 64 tile uses its warps better, but only once there are two for each multiprocessor
    // (an H200 has 132); below that the 64 x 64 tile keeps twice as many of them busy. Slicing K
    // costs a fifth of the speed, and keeps long sums of one sign at the accuracy of native FP32.
    // Two parts cost a few percent, and are where one would be less accurate than native FP32,
    // which is best in short sums and, as cuBLAS splits K, in long ones. Sums of up to 64 products
    // average too little over the errors of two slices: BF16x6 has three, and the exponents of
    // TF32, but not those of FP16x3. Slices in shared memory have room for `shared_slices_k`.
    static const std::vector<KernelRule> table = {
        // mode, CUDA, compute capability from, to, CUDA version from, aligned, fills
        // multiprocessors, tiles from, K from, kernel
        {Mode::fp32, false, 0, 0, 0, no, no, 0, 0, K::cpu_fp32},
        {Mode::tf32, false, 0, 0, 0, no, no, 0, 0, K::cpu_emulated},
        {Mode::tf32x3, false, 0, 0, 0, no, no, 0, 0, K::cpu_emulated},
        {Mode::fp16x3, false, 0, 0, 0, no, no, 0, 0, K::cpu_emulated},
        {Mode::bf16x6, false, 0, 0, 0, no, no, 0, 0, K::cpu_emulated},
        {Mode::bf16x9, false, 0, 0, 0, no, no, 0, 0, K::cpu_emulated},
        {Mode::bf16x9_eager, false, 0, 0, 0, no, no, 0, 0, K::cpu_emulated},
        {Mode::fp32, true, 0, any_newer, 0, no, no, 0, 0, K::cublas_fp32},
        {Mode::tf32, true, 80, any_newer, 0, no, no, 0, 0, K::cublas_tf32},
        {Mode::tf32x3, true, 90, 90, 0, no, no, 0, 1024, K::wgmma_tf32x3_two_parts},
        {Mode::tf32x3, true, 90, 90, 0, no, no, 0, 128, K::wgmma_tf32x3},
        {Mode::tf32x3, true, 90, 90, 0, no, no, 0, 65, K::wgmma_tf32x3_two_parts},
        {Mode::tf32x3, true, 90, 90, 0, no, no, 0, 0, K::wgmma_bf16x6_two_parts},
        {Mode::fp16x3, true, 90, 90, 0, no, no, 0, wgmma::shared_slices_k + 1, K::wgmma_fp16x3},
        {Mode::fp16x3, true, 90, 90, 0, no, yes, 0, 65, K::wgmma_fp16x3_shared_slices},
        {Mode::fp16x3, true, 90, 90, 0, no, no, 0, 65, K::wgmma_fp16x3},
        {Mode::fp16x3, true, 90, 90, 0, no, no, 0, 0, K::cublas_fp32},
        {Mode::bf16x6, true, 90, 90, 0, no, no, 0, 65, K::wgmma_bf16x6},
        {Mode::bf16x6, true, 90, 90, 0, no, no, 0, 0, K::wgmma_bf16x6_two_parts},
        {Mode::bf16x9, true, 90, 90, 0, no, no, 0, 65, K::wgmma_bf16x9},
        {Mode::bf16x9, true, 90, 90, 0, no, no, 0, 0, K::wgmma_bf16x9_two_parts},
        {Mode::bf16x9_eager, true, 90, 90, 0, no, no, 0, 65, K::wgmma_bf16x9},
        {Mode::bf16x9_eager, true, 90, 90, 0, no, no, 0, 0, K::wgmma_bf16x9_two_parts},
        {Mode::tf32x3,
         true,
         80,
         any_newer,
         0,
         yes,
         no,
         264,
         1025,
         K::cutlass_3xtf32_128x64_sliced_k},
        {Mode::tf32x3, true, 80, any_newer, 0, yes, no, 264, 0, K::cutlass_3xtf32_128x64},
        {Mode::tf32x3, true, 80, any_newer, 0, yes, no, 0, 0, K::cutlass_3xtf32_64x64_sliced_k},
        {Mode::tf32x3,
         true,
         80,
         any_newer,
         0,
         no,
         no,
         0,
         0,
         K::cutlass_3xtf32_64x64_sliced_k_unaligned},
        {Mode::bf16x6, true, 80, 89, 0, yes, no, 264, 0, K::mma_bf16x6_128x64},
        {Mode::bf16x6, true, 80, 89, 0, yes, no, 0, 0, K::mma_bf16x6_64x64},
        {Mode::bf16x6, true, 80, 89, 0, no, no, 0, 0, K::mma_bf16x6_64x64_unaligned},
        {Mode::bf16x6, true, 120, 129, 0, yes, no, 264, 0, K::mma_bf16x6_128x64},
        {Mode::bf16x6, true, 120, 129, 0, yes, no, 0, 0, K::mma_bf16x6_64x64},
        {Mode::bf16x6, true, 120, 129, 0, no, no, 0, 0, K::mma_bf16x6_64x64_unaligned},
        {Mode::bf16x9, true, 80, 89, 0, yes, no, 264, 0, K::mma_bf16x9_128x64},
        {Mode::bf16x9, true, 80, 89, 0, yes, no, 0, 0, K::mma_bf16x9_64x64},
        {Mode::bf16x9, true, 80, 89, 0, no, no, 0, 0, K::mma_bf16x9_64x64_unaligned},
        {Mode::bf16x9, true, 120, 129, 0, yes, no, 264, 0, K::mma_bf16x9_128x64},
        {Mode::bf16x9, true, 120, 129, 0, yes, no, 0, 0, K::mma_bf16x9_64x64},
        {Mode::bf16x9, true, 120, 129, 0, no, no, 0, 0, K::mma_bf16x9_64x64_unaligned},
        {Mode::bf16x9, true, 100, 100, 12090, no, no, 0, 0, K::cublas_bf16x9_performant},
        {Mode::bf16x9, true, 103, 103, 12090, no, no, 0, 0, K::cublas_bf16x9_performant},
        {Mode::bf16x9_eager, true, 100, 100, 12090, no, no, 0, 0, K::cublas_bf16x9_eager},
        {Mode::bf16x9_eager, true, 103, 103, 12090, no, no, 0, 0, K::cublas_bf16x9_eager},
    };
    return table;
}

std::string to_string(Kernel kernel) {
    return named(kernel).name;
}

Family family_of(Kernel kernel) {
    return named(kernel).family;
}

Kernel parse_kernel(const std::string &name) {
    for (const auto &entry : kernel_names) {
        if (entry.name == name) {
            return entry.kernel;
        }
    }
    throw std::invalid_argument(
        "Found '" + name +
        "', but this is no kernel; `metatomic-tc info` prints the table that names them."
    );
}

bool stays_fp32(int64_t in_features, int64_t out_features) {
    return std::min(in_features, out_features) < minimum_features;
}

std::string Plan::name() const {
    auto result = to_string(kernel);
    if (tile_n != 0) {
        result += "-128x" + std::to_string(tile_n);
    }
    if (splits > 1) {
        result += "-split-k-" + std::to_string(splits);
    }
    return result;
}

Plan plan(const Problem &problem, const Hardware &hardware) {
    return complete(kernel_for(problem, problem.mode, hardware), problem, hardware);
}

Plan plan_with(
    Kernel kernel, const Problem &problem, const Hardware &hardware, int tile_n, int splits
) {
    for (const auto &rule : kernel_table()) {
        if (rule.kernel == kernel && rule.aligned && !is_aligned(problem)) {
            throw std::invalid_argument(
                "The kernel " + to_string(kernel) +
                " reads and writes vectors of 16 bytes, but found"
                " N = " +
                std::to_string(problem.N) + ", K = " + std::to_string(problem.K) +
                " or rows that do not begin at multiples of them; take one whose name ends in "
                "unaligned."
            );
        }
    }
    auto result = complete(kernel, problem, hardware);
    if (tile_n != 0) {
        if (family_of(kernel) != Family::wgmma) {
            throw std::invalid_argument(
                "Found a tiling for the kernel " + to_string(kernel) +
                ", but only the wgmma kernels take one; leave out tile_n and splits."
            );
        }
        wgmma::set_tiling(result, tile_n, splits);
    }
    return result;
}

std::vector<Mode> supported_modes(const Hardware &hardware) {
    auto result = std::vector<Mode>();
    for (auto mode : all_modes()) {
        const auto &table = kernel_table();
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
    kernel_for(Problem{mode, 1, 1, 1}, mode, hardware);
    return mode;
}

std::string to_string(AttentionKernel kernel) {
    switch (kernel) {
    case AttentionKernel::cpu:
        return "attention-cpu";
    case AttentionKernel::cuda:
        return "attention-cuda";
    case AttentionKernel::cuda_tf32x3:
        return "attention-cuda-tf32x3";
    }
    throw std::logic_error("This value of metatomic_tc::AttentionKernel has no name.");
}

const std::vector<AttentionRule> &attention_table() {
    // bf16x9 is for those who want nothing left out
    static const std::vector<AttentionRule> table = {
        {Mode::tf32x3, 80, 16},
        {Mode::tf32x3, 80, 32},
        {Mode::fp16x3, 80, 16},
        {Mode::fp16x3, 80, 32},
        {Mode::bf16x6, 80, 16},
        {Mode::bf16x6, 80, 32},
    };
    return table;
}

AttentionKernel
attention_kernel(Mode mode, const Hardware &hardware, int64_t head_size, bool fp32) {
    if (!hardware.cuda) {
        return AttentionKernel::cpu;
    }
    for (const auto &rule : attention_table()) {
        if (fp32 && rule.mode == mode &&
            hardware.compute_capability >= rule.min_compute_capability &&
            rule.head_size == head_size) {
            return AttentionKernel::cuda_tf32x3;
        }
    }
    return AttentionKernel::cuda;
}

} // namespace metatomic_tc
