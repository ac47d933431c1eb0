#pragma once

#include <cuda_runtime_api.h>

#include "product/gemm.hpp"

/// Slicing turns an Inf into Inf - Inf = NaN, and a value close to FLT_MAX into Inf. Both show as
/// an output that is not finite, and those outputs are computed again in FP32.
namespace metatomic_tc::nonfinite {

/// Clears the flag, on `stream`.
void clear(int *flag, cudaStream_t stream);

/// Where `flag` is null or set, computes every output of `problem` that is Inf or NaN again, one
/// FP32 fused multiply-add after the other. Costs a launch when the flag is clear.
void repair(const Gemm &problem, const int *flag, cudaStream_t stream);

/// Enqueues a product and its repair: `product(flag, stream)` sets the flag, which is clear, when
/// an output is Inf or NaN.
template <typename Product>
void repaired(const Gemm &problem, void *workspace, void *stream, Product product) {
    auto *flag = static_cast<int *>(workspace);
    auto cuda_stream = static_cast<cudaStream_t>(stream);
    clear(flag, cuda_stream);
    product(flag, cuda_stream);
    repair(problem, flag, cuda_stream);
}

} // namespace metatomic_tc::nonfinite
