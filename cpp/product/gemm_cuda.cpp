#include "gemm.hpp"

#include <stdexcept>

#include <cuda_runtime_api.h>

#include "product/cublas/cublas.hpp"
#include "product/cutlass/3xtf32.hpp"
#include "product/mma/bf16.hpp"
#include "product/wgmma/wgmma.hpp"

#include "cuda_status.hpp"

namespace metatomic_tc {

namespace {

/// The plan counts on vectors of 16 bytes where it says so.
void expect_planned(const Plan &plan, const Gemm &operands) {
    const auto &problem = plan.problem;
    auto same =
        problem.M == operands.M && problem.N == operands.N && problem.K == operands.K &&
        (problem.direction == Direction::forward) == operands.transpose_b &&
        (plan.fuses_activation ? problem.activation : Activation::none) == operands.activation;
    auto aligned = is_aligned(operands.C) && is_aligned(operands.pre_activation) &&
                   (is_aligned(operands.A, operands.lda) || !problem.aligned_a) &&
                   (is_aligned(operands.B, operands.ldb) || !problem.aligned_weight) &&
                   (is_aligned(operands.bias) || !problem.aligned_bias);
    if (!same || !aligned) {
        throw std::logic_error(
            "The operands of a product are not those that " + plan.name() + " was planned for."
        );
    }
}

} // namespace

void gemm_pack(const Plan &plan, const Gemm &operands, void *packed, void *stream) {
    if (plan.packed_size == 0) {
        throw std::logic_error("The kernel " + plan.name() + " reads the weight as it is.");
    }
    wgmma::pack(plan, operands, packed, stream);
}

bool is_captured(void *stream) {
    auto status = cudaStreamCaptureStatusNone;
    check(
        cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status),
        "asking whether a graph is captured"
    );
    return status != cudaStreamCaptureStatusNone;
}

void gemm(const Plan &plan, const Gemm &operands, void *packed, void *workspace, void *stream) {
    expect_planned(plan, operands);
    switch (family_of(plan.kernel)) {
    case Family::cublas:
        return cublas::gemm(plan, operands, workspace, stream);
    case Family::cutlass:
        return cutlass_3xtf32::gemm(plan.kernel, operands, workspace, stream);
    case Family::mma:
        return mma_bf16::gemm(plan.kernel, operands, workspace, stream);
    case Family::wgmma:
        return wgmma::gemm(plan, operands, packed, workspace, stream);
    case Family::cpu:
        break;
    }
    throw std::logic_error(plan.name() + " does not run on a CUDA device.");
}

Hardware cuda_hardware(int index) {
    auto properties = cudaDeviceProp();
    auto status = cudaGetDeviceProperties(&properties, index);
    if (status != cudaSuccess) {
        throw std::runtime_error(
            "CUDA device " + std::to_string(index) +
            " was not found: " + cudaGetErrorString(status) + "."
        );
    }
    auto hardware = Hardware();
    hardware.cuda = true;
    hardware.compute_capability = 10 * properties.major + properties.minor;
    hardware.cuda_version = cublas::cuda_version();
    hardware.multiprocessors = properties.multiProcessorCount;
    hardware.name = properties.name;
    for (auto byte : properties.uuid.bytes) {
        constexpr auto digits = "0123456789abcdef";
        hardware.uuid += {digits[(byte >> 4) & 15], digits[byte & 15]};
    }
    return hardware;
}

const char *cuda_architectures() {
    return METATOMIC_TC_CUDA_ARCHITECTURES;
}

int cuda_toolkit_version() {
    return CUDART_VERSION;
}

} // namespace metatomic_tc
