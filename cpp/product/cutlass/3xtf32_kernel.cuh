// CUTLASS 3xTF32 GEMMs; `cutlass_3xtf32_*.cu` instantiate them for one layout each, in few files
// since the headers take far longer to compile than a kernel.
//
// CUTLASS truncates the high part of an operand. Its low part is then never negative and the
// dropped product lo·lo has a bias of 4 in units of 2⁻²⁴·|a·b|, which on data of one sign exceeds
// the error of native FP32. The specialisation below rounds the high part to nearest instead.
// CUTLASS clears the Tensor Core accumulator after every step of K that a warp takes (16 here) and
// adds it in FP32, so the hardware's truncating accumulation stays short.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"

namespace cutlass {

template <>
struct NumericConverterFastF32<
    FloatRoundStyle::round_toward_zero,
    FloatRoundStyle::round_half_ulp_truncate> {
    using result_type = Array<tfloat32_t, 2>;
    using source_type = float;

    CUTLASS_HOST_DEVICE static tfloat32_t nearest(float value) {
        uint32_t bits = reinterpret_cast<uint32_t const &>(value);
        return tfloat32_t::bitcast((bits + 0x1000u) & ~0x1fffu);
    }

    CUTLASS_HOST_DEVICE static result_type convert(source_type const &source) {
        result_type result;
        result[0] = nearest(source);
        result[1] = nearest(source - static_cast<float>(result[0]));
        return result;
    }

    CUTLASS_HOST_DEVICE result_type operator()(source_type const &source) const {
        return convert(source);
    }
};

} // namespace cutlass

#include "cutlass/gemm/device/gemm.h"

#include "3xtf32.hpp"

namespace metatomic_tc::cutlass_3xtf32 {

/// Epilogue: accumulator + bias, and a note when a result is Inf or NaN.
template <int Count> class BiasEpilogue {
  public:
    using ElementOutput = float;
    using ElementSource = float;
    using ElementAccumulator = float;
    using ElementCompute = float;
    using ElementScalar = float;
    using ElementC = float;
    using ElementD = float;
    static int const kCount = Count;
    using FragmentOutput = cutlass::Array<float, Count>;
    using FragmentSource = cutlass::Array<float, Count>;
    using FragmentAccumulator = cutlass::Array<float, Count>;

    struct Params {
        bool has_bias = false;
        /// Set to 1 when a result is Inf or NaN.
        int *nonfinite = nullptr;
    };

    CUTLASS_HOST_DEVICE BiasEpilogue(Params const &params) : params_(params) {}

    CUTLASS_HOST_DEVICE bool is_source_needed() const {
        return params_.has_bias;
    }

    CUTLASS_HOST_DEVICE void set_k_partition(int, int) {}

    CUTLASS_DEVICE FragmentOutput
    operator()(FragmentAccumulator const &accumulator, FragmentSource const &source) const {
        return noted(cutlass::plus<FragmentAccumulator>()(accumulator, source));
    }

    CUTLASS_DEVICE FragmentOutput operator()(FragmentAccumulator const &accumulator) const {
        return noted(accumulator);
    }

  private:
    CUTLASS_DEVICE FragmentOutput noted(FragmentAccumulator const &values) const {
        bool finite = true;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Count; i++) {
            finite = finite && ::isfinite(values[i]);
        }
        if (!finite) {
            *params_.nonfinite = 1;
        }
        return values;
    }

    Params params_;
};

/// Alignment is that of all operands, in elements. LayoutB is column-major for C = A·Bᵀ with B
/// stored [N,K], row-major for C = A·B with B stored [K,N].
template <typename Threadblock, typename Warp, int Stages, int Alignment, typename LayoutB>
void run(Gemm const &problem, int *nonfinite, cudaStream_t stream) {
    using RowMajor = cutlass::layout::RowMajor;
    using Kernel = cutlass::gemm::device::Gemm<
        float,
        RowMajor,
        float,
        LayoutB,
        float,
        RowMajor,
        float,
        cutlass::arch::OpClassTensorOp,
        cutlass::arch::Sm80,
        Threadblock,
        Warp,
        cutlass::gemm::GemmShape<16, 8, 8>,
        BiasEpilogue<Alignment>,
        cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>,
        Stages,
        Alignment,
        Alignment,
        false,
        cutlass::arch::OpMultiplyAddFastF32>;

    auto index = [](int64_t value) { return static_cast<int>(value); };
    // a leading dimension of zero repeats the bias in every row of C
    auto arguments = typename Kernel::Arguments(
        {index(problem.M), index(problem.N), index(problem.K)},
        {problem.A, index(problem.lda)},
        {problem.B, index(problem.ldb)},
        {problem.bias, 0},
        {problem.C, index(problem.ldc)},
        {problem.bias != nullptr, nonfinite}
    );
    auto kernel = Kernel();
    auto status = kernel.initialize(arguments, nullptr, stream);
    if (status == cutlass::Status::kSuccess) {
        status = kernel.run(stream);
    }
    if (status != cutlass::Status::kSuccess) {
        throw std::runtime_error(
            std::string("The CUTLASS 3xTF32 kernel failed: ") + cutlassGetStatusString(status) +
            " (" + cudaGetErrorString(cudaGetLastError()) +
            ") for M = " + std::to_string(problem.M) + ", N = " + std::to_string(problem.N) +
            ", K = " + std::to_string(problem.K) + "."
        );
    }
}

using Threadblock128x64 = cutlass::gemm::GemmShape<128, 64, 16>;
using Warp64x32 = cutlass::gemm::GemmShape<64, 32, 16>;
// Sliced K: half of the warps take the even, half the odd 16 columns of every 32 of K and add their
// sums at the end, so that each adds half as often in FP32.
using Threadblock128x64SlicedK = cutlass::gemm::GemmShape<128, 64, 32>;
using Threadblock64x64SlicedK = cutlass::gemm::GemmShape<64, 64, 32>;
using Warp32x32 = cutlass::gemm::GemmShape<32, 32, 16>;

template <bool TransposeB>
void run_layout(Kernel kernel, const Gemm &problem, int *nonfinite, cudaStream_t stream) {
    using Transposed = cutlass::layout::ColumnMajor;
    using Plain = cutlass::layout::RowMajor;
    using LayoutB = std::conditional_t<TransposeB, Transposed, Plain>;
    switch (kernel) {
    case Kernel::cutlass_3xtf32_64x64_sliced_k_unaligned:
        return run<Threadblock64x64SlicedK, Warp32x32, 4, 1, LayoutB>(problem, nonfinite, stream);
    case Kernel::cutlass_3xtf32_128x64:
        return run<Threadblock128x64, Warp64x32, 3, 4, LayoutB>(problem, nonfinite, stream);
    case Kernel::cutlass_3xtf32_128x64_sliced_k:
        return run<Threadblock128x64SlicedK, Warp64x32, 3, 4, LayoutB>(problem, nonfinite, stream);
    case Kernel::cutlass_3xtf32_64x64_sliced_k:
        return run<Threadblock64x64SlicedK, Warp32x32, 4, 4, LayoutB>(problem, nonfinite, stream);
    default:
        throw std::logic_error(to_string(kernel) + " is not a kernel of CUTLASS.");
    }
}

} // namespace metatomic_tc::cutlass_3xtf32
