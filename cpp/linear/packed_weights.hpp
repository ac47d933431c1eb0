#pragma once

#include <vector>

#include <ATen/ATen.h>

#include "product/gemm.hpp"

namespace metatomic_tc {

/// Weights that nobody changes while this lives. Products on a GPU, whoever asks for them, pack
/// each of them once, not at every call. For one product at a time, so for one thread and one
/// stream.
class PackedWeights {
  public:
    /// @param weights of any device and type; only FP32 matrices on a CUDA device matter
    explicit PackedWeights(const std::vector<at::Tensor> &weights);
    ~PackedWeights();
    PackedWeights(const PackedWeights &) = delete;
    PackedWeights &operator=(const PackedWeights &) = delete;

    /// For `gemm`: `operands.B` packed on `stream`. Null if that is no such weight or need not be
    /// packed, and for one that is not packed yet while a graph captures the stream.
    ///
    /// @param weight the tensor that `operands.B` is in
    static void *
    find(const Plan &plan, const Gemm &operands, const at::Tensor &weight, void *stream);

  private:
    std::vector<at::Tensor> weights;
};

} // namespace metatomic_tc
