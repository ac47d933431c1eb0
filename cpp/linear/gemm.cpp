#include <c10/core/DeviceGuard.h>

#include "metatomic_tc/linear.hpp"
#include "operators.hpp"

namespace metatomic_tc {

at::Tensor gemm_cuda(
    const at::Tensor &a,
    const at::Tensor &b,
    const std::optional<at::Tensor> &bias,
    bool transpose_b,
    std::string kernel,
    int64_t tile_n,
    int64_t splits
) {
    auto K = b.dim() == 2 ? b.size(transpose_b ? 1 : 0) : -1;
    TORCH_CHECK_VALUE(
        a.dim() == 2 && a.size(1) == K && a.scalar_type() == at::kFloat &&
            b.scalar_type() == at::kFloat && b.device() == a.device(),
        "metatomic_tc::gemm needs two float32 matrices that can be multiplied, on one device, but "
        "found ",
        a.sizes(),
        " of ",
        a.scalar_type(),
        " on ",
        a.device(),
        " and ",
        b.sizes(),
        " of ",
        b.scalar_type(),
        " on ",
        b.device(),
        "."
    );
    auto N = b.size(transpose_b ? 0 : 1);
    TORCH_CHECK_VALUE(
        !bias.has_value() || (bias->dim() == 1 && bias->size(0) == N &&
                              bias->scalar_type() == at::kFloat && bias->device() == a.device()),
        "metatomic_tc::gemm needs a float32 bias of shape [",
        N,
        "] on the device of the matrices."
    );
    TORCH_CHECK_VALUE(
        a.numel() > 0 && b.numel() > 0, "metatomic_tc::gemm needs matrices that are not empty."
    );
    TORCH_CHECK_VALUE(
        (tile_n == 0 && splits == 0) || ((tile_n == 64 || tile_n == 128) && splits >= 1),
        "metatomic_tc::gemm needs tile_n 64 or 128 and splits of 1 or more, or both 0, but found ",
        tile_n,
        " and ",
        splits,
        "."
    );
    auto guard = c10::DeviceGuard(a.device());
    auto result = at::empty({a.size(0), N}, a.options());
    auto direction = transpose_b ? Direction::forward : Direction::input_gradient;
    auto operands = CudaOperands(a, b, bias, direction);
    auto plan = plan_with(
        parse_kernel(kernel),
        operands.problem,
        hardware(a.device()),
        static_cast<int>(tile_n),
        static_cast<int>(splits)
    );
    operands.run(plan, result, at::Tensor());
    return result;
}

} // namespace metatomic_tc
