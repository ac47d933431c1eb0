#include "metatomic_tc/gemm.hpp"

#include <stdexcept>

#include <cuda_runtime_api.h>

#include "cuda_status.hpp"
#include "cutlass_3xtf32.hpp"
#include "nonfinite.hpp"
#include "product/cublas/cublas.hpp"
#include "product/mma/bf16.hpp"
#include "product/wgmma/wgmma.hpp"

namespace metatomic_tc {

namespace {

bool uses_wgmma(Implementation implementation) {
    switch (implementation) {
    case Implementation::wgmma_tf32x3:
    case Implementation::wgmma_fp16x3:
    case Implementation::wgmma_bf16x6:
    case Implementation::wgmma_bf16x9:
        return true;
    default:
        return false;
    }
}

} // namespace

bool fuses_activation(Implementation implementation) {
    return uses_wgmma(implementation);
}

int gemm_packing(Implementation implementation, const Gemm &problem) {
    return uses_wgmma(implementation) ? wgmma::packing(implementation, problem) : 0;
}

std::size_t gemm_packed_size(Implementation implementation, const Gemm &problem) {
    return wgmma::packed_size(implementation, problem);
}

void gemm_pack(Implementation implementation, const Gemm &problem, void *packed, void *stream) {
    wgmma::pack(implementation, problem, packed, stream);
}

bool is_captured(void *stream) {
    auto status = cudaStreamCaptureStatusNone;
    check(
        cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status),
        "asking whether a graph is captured"
    );
    return status != cudaStreamCaptureStatusNone;
}

std::size_t gemm_workspace_size(Implementation implementation, const Gemm &problem) {
    switch (implementation) {
    case Implementation::cublas_fp32:
    case Implementation::cublas_tf32:
    case Implementation::cublas_bf16x9_performant:
    case Implementation::cublas_bf16x9_eager:
        return cublas::workspace_size;
    case Implementation::wgmma_tf32x3:
    case Implementation::wgmma_fp16x3:
    case Implementation::wgmma_bf16x6:
    case Implementation::wgmma_bf16x9:
        return wgmma::workspace_size(implementation, problem);
    case Implementation::cutlass_3xtf32_128x64:
    case Implementation::cutlass_3xtf32_128x64_sliced_k:
    case Implementation::cutlass_3xtf32_64x64_sliced_k:
    case Implementation::mma_bf16x6_128x64:
    case Implementation::mma_bf16x6_64x64:
    case Implementation::mma_bf16x9_128x64:
    case Implementation::mma_bf16x9_64x64:
        return nonfinite::workspace_size;
    case Implementation::cpu_fp32:
    case Implementation::cpu_emulated:
        break;
    }
    throw std::logic_error(to_string(implementation) + " does not run on a CUDA device.");
}

void gemm(
    Implementation implementation,
    const Gemm &problem,
    void *workspace,
    std::size_t workspace_size,
    void *stream
) {
    if (problem.activation != Activation::none && !fuses_activation(implementation)) {
        throw std::logic_error(to_string(implementation) + " does not compute activations.");
    }
    auto needed = gemm_workspace_size(implementation, problem);
    if (workspace_size < needed) {
        throw std::runtime_error(
            "Found a workspace of " + std::to_string(workspace_size) + " bytes, but " +
            to_string(implementation) + " needs " + std::to_string(needed) + "."
        );
    }
    switch (implementation) {
    case Implementation::cublas_fp32:
    case Implementation::cublas_tf32:
        return cublas::gemm(implementation, problem, workspace, stream);
    case Implementation::cublas_bf16x9_performant:
    case Implementation::cublas_bf16x9_eager:
        cublas::gemm(implementation, problem, workspace, stream);
        return nonfinite::repair(problem, nullptr, static_cast<cudaStream_t>(stream));
    case Implementation::wgmma_tf32x3:
    case Implementation::wgmma_fp16x3:
    case Implementation::wgmma_bf16x6:
    case Implementation::wgmma_bf16x9:
        return wgmma::gemm(implementation, problem, workspace, stream);
    case Implementation::mma_bf16x6_128x64:
    case Implementation::mma_bf16x6_64x64:
    case Implementation::mma_bf16x9_128x64:
    case Implementation::mma_bf16x9_64x64:
        return mma_bf16::gemm(implementation, problem, workspace, stream);
    default:
        return cutlass_3xtf32::gemm(implementation, problem, workspace, stream);
    }
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
