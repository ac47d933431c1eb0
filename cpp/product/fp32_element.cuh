#pragma once

#include <cstdint>

#include "product/gemm.hpp"

namespace metatomic_tc {

/// One element of A·B + bias, in FP32.
__device__ inline float fp32_element(const Gemm &problem, int64_t row, int64_t column) {
    const auto *a = problem.A + row * problem.lda;
    const auto *b = problem.B + column * (problem.transpose_b ? problem.ldb : 1);
    auto step = problem.transpose_b ? 1 : problem.ldb;
    auto sum = 0.0f;
#pragma unroll 1
    for (int64_t k = 0; k < problem.K; k++) {
        sum = fmaf(a[k], b[k * step], sum);
    }
    return problem.bias == nullptr ? sum : sum + problem.bias[column];
}

} // namespace metatomic_tc
