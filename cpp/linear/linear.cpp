#include "metatomic_tc/linear.hpp"

#include "operators.hpp"

#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <vector>

#include <dlfcn.h>

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "packed_weights.hpp"
#include "product/slices.hpp"
#include "rows/stream.hpp"

namespace metatomic_tc {

namespace {

using at::Tensor;

/// The checks common to both operators. `columns` is the size the last dimension of `rows` must
/// have, and `role` what `rows` is called in messages.
void check(const Tensor &rows, const char *role, const Tensor &weight, int weight_dimension) {
    TORCH_CHECK_TYPE(
        rows.scalar_type() == at::kFloat || rows.scalar_type() == at::kDouble,
        "metatomic_tc::linear computes in float32 or float64, but found ",
        role,
        " of dtype ",
        rows.scalar_type(),
        "; convert the model or its inputs."
    );
    TORCH_CHECK_TYPE(
        weight.scalar_type() == rows.scalar_type(),
        "metatomic_tc::linear needs ",
        role,
        " and weight of one dtype, but found ",
        rows.scalar_type(),
        " and ",
        weight.scalar_type(),
        "."
    );
    TORCH_CHECK(
        weight.device() == rows.device(),
        "metatomic_tc::linear needs ",
        role,
        " and weight on one device, but found ",
        rows.device(),
        " and ",
        weight.device(),
        "."
    );
    TORCH_CHECK_VALUE(
        weight.dim() == 2,
        "metatomic_tc::linear needs a weight of shape [out_features, in_features], but found ",
        weight.sym_sizes(),
        "."
    );
    TORCH_CHECK_VALUE(
        rows.dim() >= 1 && rows.sym_size(-1) == weight.sym_size(weight_dimension),
        "metatomic_tc::linear needs ",
        role,
        " of shape [..., ",
        weight.sym_size(weight_dimension),
        "] for a weight of shape ",
        weight.sym_sizes(),
        ", but found ",
        rows.sym_sizes(),
        "."
    );
}

void check_bias(const std::optional<Tensor> &bias, const Tensor &weight) {
    if (!bias.has_value() || !bias->defined()) {
        return;
    }
    TORCH_CHECK_TYPE(
        bias->scalar_type() == weight.scalar_type(),
        "metatomic_tc::linear needs weight and bias of one dtype, but found ",
        weight.scalar_type(),
        " and ",
        bias->scalar_type(),
        "."
    );
    TORCH_CHECK(
        bias->device() == weight.device(),
        "metatomic_tc::linear needs weight and bias on one device, but found ",
        weight.device(),
        " and ",
        bias->device(),
        "."
    );
    TORCH_CHECK_VALUE(
        bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0),
        "metatomic_tc::linear needs a bias of shape [",
        weight.sym_size(0),
        "], but found ",
        bias->sym_sizes(),
        "."
    );
}

Tensor operand(const Tensor &weight, Direction direction) {
    return direction == Direction::forward ? weight.t() : weight;
}

/// The slices of a matrix, contiguous, and for each of its rows the power of two that undoes their
/// scaling.
struct SlicedMatrix {
    std::vector<Tensor> slices;
    Tensor powers;
};

SlicedMatrix sliced(const Tensor &matrix, Mode mode) {
    auto contiguous = matrix.contiguous();
    auto rows = contiguous.size(0), columns = contiguous.size(1);
    auto result = SlicedMatrix{{}, at::empty({rows}, contiguous.options())};
    for (int i = 0; i < slice_products(mode).slices; i++) {
        result.slices.push_back(at::empty_like(contiguous));
    }
    const auto *values = contiguous.const_data_ptr<float>();
    auto *powers = result.powers.data_ptr<float>();
    auto grain_size = std::max<int64_t>(1, (1 << 16) / columns);
    at::parallel_for(0, rows, grain_size, [&](int64_t begin, int64_t end) {
        for (auto row = begin; row < end; row++) {
            auto pointers = std::array<float *, 3>{};
            for (std::size_t i = 0; i < result.slices.size(); i++) {
                pointers[i] = result.slices[i].data_ptr<float>() + row * columns;
            }
            powers[row] = split(mode, values + row * columns, columns, pointers.data());
        }
    });
    return result;
}

using Sgemm = void(
    const char *,
    const char *,
    const int *,
    const int *,
    const int *,
    const float *,
    const float *,
    const int *,
    const float *,
    const int *,
    const float *,
    float *,
    const int *
);

/// The BLAS that PyTorch computes FP32 products with; null where it has none of this name. It is
/// looked for in PyTorch's library: a program may have another one, LAMMPS a slow one.
Sgemm *sgemm() {
    static auto *const function = [] {
        auto *library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
        return library == nullptr ? nullptr : reinterpret_cast<Sgemm *>(dlsym(library, "sgemm_"));
    }();
    return function;
}

/// `result = alpha * rows * weight[:, k: k + rows.size(1)]ᵀ + beta * result` of contiguous FP32
/// matrices. Not by PyTorch, which may be told to compute FP32 products in less than FP32.
void add_product(
    const Tensor &result,
    const Tensor &rows,
    const Tensor &weight,
    int64_t k,
    float alpha,
    float beta
) {
    auto *blas = sgemm();
    if (blas == nullptr || std::max({rows.numel(), weight.numel(), result.numel()}) > INT_MAX) {
        result.addmm_(rows, weight.narrow(1, k, rows.size(1)).t(), beta, alpha);
        return;
    }
    auto M = static_cast<int>(rows.size(0)), K = static_cast<int>(rows.size(1));
    auto N = static_cast<int>(weight.size(0)), ldb = static_cast<int>(weight.size(1));
    // a row-major matrix is the transpose of a column-major one
    blas(
        "T",
        "N",
        &N,
        &M,
        &K,
        &alpha,
        weight.const_data_ptr<float>() + k,
        &ldb,
        rows.const_data_ptr<float>(),
        &K,
        &beta,
        result.mutable_data_ptr<float>(),
        &N
    );
}

/// The products of a mode on the CPU: each by FP32 BLAS, added from the smallest band up, chunk by
/// chunk of K where the mode has chunks.
Tensor emulated_product(const Tensor &rows, const Tensor &weight, Direction direction, Mode mode) {
    const auto &products = slice_products(mode);
    auto K = rows.size(1);
    auto chunk = products.chunk == 0 ? K : products.chunk;
    auto right = sliced(operand(weight, direction).t(), mode);
    auto result = at::zeros({rows.size(0), right.powers.size(0)}, rows.options());
    auto part = at::empty(result.sizes(), result.options());
    for (int64_t k = 0; k < K; k += chunk) {
        auto size = std::min(chunk, K - k);
        auto left = sliced(rows.narrow(1, k, size), mode);
        auto beta = 0.0f; // the first product overwrites
        for (const auto &band : products.bands) {
            for (auto [i, j] : band) {
                auto alpha = std::pow(products.scale, static_cast<float>(-(i + j)));
                add_product(part, left.slices[i], right.slices[j], k, alpha, beta);
                beta = 1.0f;
            }
        }
        result.addcmul_(part, left.powers.unsqueeze(1));
    }
    result.mul_(right.powers);
    // Inf and NaN in, or an overflow of a slice or of what is still to be scaled back: FP32 decides
    // what comes out
    auto finite = result.isfinite();
    if (!finite.all().item<bool>()) {
        result = at::where(finite, result, at::mm(rows, operand(weight, direction)));
    }
    return result;
}

/// `matrix` with unit stride along its rows, and its leading dimension.
std::pair<Tensor, int64_t> row_major(const Tensor &matrix) {
    auto rows = matrix.size(0), columns = matrix.size(1);
    auto unit = matrix.stride(1) == 1 || columns == 1;
    if (unit && (rows == 1 || matrix.stride(0) >= columns)) {
        return {matrix, rows == 1 ? columns : matrix.stride(0)};
    }
    return {matrix.contiguous(), columns};
}

void check_input_gradient(const Tensor &grad_output, const Tensor &weight) {
    check(grad_output, "a gradient of the output", weight, 0);
}

} // namespace

void check_linear(const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias) {
    check(input, "an input", weight, 1);
    check_bias(bias, weight);
}

namespace {

/// `activation` of a product by PyTorch. Where `product` is not kept, it may be overwritten.
Activated activate(const Tensor &product, Activation activation, bool keep_pre_activation) {
    auto output = product;
    if (activation == Activation::swiglu) {
        output = at::glu(product, -1);
    } else if (activation == Activation::silu) {
        output = keep_pre_activation ? at::silu(product) : at::silu_(output);
    }
    return {output, keep_pre_activation ? product : Tensor()};
}

/// By PyTorch, in the type of the operands.
Tensor plain_product(
    const Tensor &rows, const Tensor &weight, const OptionalTensor &bias, Direction direction
) {
    return direction == Direction::forward ? at::linear(rows, weight, bias)
                                           : at::matmul(rows, weight);
}

} // namespace

CudaOperands::CudaOperands(
    const Tensor &rows, const Tensor &weight, const OptionalTensor &bias, Direction direction
) {
    auto forward = direction == Direction::forward;
    int64_t lda = 0, ldb = 0;
    std::tie(this->rows, lda) = row_major(rows);
    std::tie(this->weight, ldb) = row_major(weight);
    this->bias = bias.has_value() && bias->defined() ? bias->contiguous() : Tensor();
    gemm = Gemm{
        .M = rows.size(0),
        .N = weight.size(forward ? 0 : 1),
        .K = rows.size(1),
        .A = this->rows.const_data_ptr<float>(),
        .lda = lda,
        .B = this->weight.const_data_ptr<float>(),
        .ldb = ldb,
        .transpose_b = forward,
        .bias = this->bias.defined() ? this->bias.const_data_ptr<float>() : nullptr,
        .C = nullptr,
        .ldc = 0,
    };
    problem = Problem{
        .M = gemm.M,
        .N = gemm.N,
        .K = gemm.K,
        .direction = direction,
        .aligned_a = is_aligned(gemm.A, lda),
        .aligned_weight = is_aligned(gemm.B, ldb),
        .aligned_bias = is_aligned(gemm.bias),
    };
}

void CudaOperands::run(const Plan &plan, const Tensor &result, const Tensor &pre_activation) {
    auto *stream = stream_of(rows);
    gemm.activation = plan.fuses_activation ? plan.problem.activation : Activation::none;
    gemm.C = result.mutable_data_ptr<float>();
    gemm.ldc = result.size(-1);
    gemm.pre_activation =
        pre_activation.defined() ? pre_activation.mutable_data_ptr<float>() : nullptr;
    auto *packed = PackedWeights::find(plan, gemm, weight, stream);
    auto size = plan.workspace_size + (packed == nullptr ? plan.packed_size : 0);
    auto workspace = at::empty({static_cast<int64_t>(size)}, rows.options().dtype(at::kByte));
    metatomic_tc::gemm(plan, gemm, packed, workspace.mutable_data_ptr(), stream);
}

Activated product(
    const Tensor &rows,
    const Tensor &weight,
    const OptionalTensor &bias,
    Direction direction,
    const std::string &mode_name,
    Activation activation,
    bool keep_pre_activation
) {
    auto guard = c10::DeviceGuard(rows.device());
    auto forward = direction == Direction::forward;
    auto N = weight.size(forward ? 0 : 1), K = weight.size(forward ? 1 : 0);
    auto flat = rows.reshape({-1, K});
    auto problem = Problem{
        .mode = parse_mode(mode_name),
        .M = flat.size(0),
        .N = N,
        .K = K,
        .direction = direction,
        .activation = activation,
    };
    auto on = hardware(rows.device());
    if (rows.scalar_type() == at::kDouble || problem.M == 0 || N == 0 || K == 0) {
        // what the hardware cannot do is an error whatever the operands
        resolve_mode(problem.mode, on, false);
        auto result = plain_product(rows, weight, bias, direction);
        return activate(result, activation, keep_pre_activation);
    }
    auto shape = rows.sizes().vec();
    auto empty = [&](int64_t columns) {
        shape.back() = columns;
        return at::empty(shape, rows.options().memory_format(at::MemoryFormat::Contiguous));
    };
    if (!on.cuda) {
        auto result = Tensor();
        if (plan(problem, on).kernel == Kernel::cpu_fp32) {
            result = plain_product(rows, weight, bias, direction);
        } else {
            result = emulated_product(flat, weight, direction, problem.mode);
            if (bias.has_value() && bias->defined()) {
                result += *bias;
            }
            shape.back() = N;
            result = result.view(shape);
        }
        return activate(result, activation, keep_pre_activation);
    }
    auto operands = CudaOperands(flat, weight, bias, direction);
    operands.problem.mode = problem.mode;
    operands.problem.activation = activation;
    auto how = plan(operands.problem, on);
    auto fused = how.fuses_activation;
    auto result = empty(fused && activation == Activation::swiglu ? N / 2 : N);
    auto pre_activation = fused && keep_pre_activation ? empty(N) : Tensor();
    operands.run(how, result, pre_activation);
    return fused ? Activated{result, pre_activation}
                 : activate(result, activation, keep_pre_activation);
}

Tensor meta_product(const Tensor &rows, const Tensor &weight, Direction direction) {
    auto shape = rows.sym_sizes().vec();
    shape.back() = weight.sym_size(direction == Direction::forward ? 0 : 1);
    return at::empty_symint(shape, rows.options().memory_format(at::MemoryFormat::Contiguous));
}

Tensor linear_device(
    const Tensor &input, const Tensor &weight, const OptionalTensor &bias, std::string mode
) {
    check_linear(input, weight, bias);
    return product(input, weight, bias, Direction::forward, mode).output;
}

Tensor linear_meta(
    const Tensor &input, const Tensor &weight, const OptionalTensor &bias, std::string mode
) {
    check_linear(input, weight, bias);
    parse_mode(mode);
    return meta_product(input, weight, Direction::forward);
}

Tensor
linear_input_gradient_device(const Tensor &grad_output, const Tensor &weight, std::string mode) {
    check_input_gradient(grad_output, weight);
    return product(grad_output, weight, std::nullopt, Direction::input_gradient, mode).output;
}

Tensor
linear_input_gradient_meta(const Tensor &grad_output, const Tensor &weight, std::string mode) {
    check_input_gradient(grad_output, weight);
    parse_mode(mode);
    return meta_product(grad_output, weight, Direction::input_gradient);
}

namespace {

void check_cuda(c10::Device device) {
    if (!at::hasCUDA()) {
        throw std::runtime_error(
            "The device " + device.str() +
            " was asked for, but PyTorch finds no CUDA GPU here; use the CPU, or check the driver "
            "and that PyTorch is a CUDA build."
        );
    }
}

} // namespace

Hardware hardware(c10::Device device) {
    if (device.is_cpu()) {
        return Hardware();
    }
    if (!device.is_cuda()) {
        throw std::runtime_error(
            "metatomic-tc runs on cpu and cuda devices, but found the device " + device.str() + "."
        );
    }
    if (!device.has_index()) {
        check_cuda(device);
        device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
    }
    // asking the driver takes longer than a small product
    static std::mutex mutex;
    static auto &known = *new std::map<int, Hardware>();
    auto lock = std::lock_guard(mutex);
    auto entry = known.find(device.index());
    if (entry == known.end()) {
        check_cuda(device);
        entry = known.emplace(device.index(), cuda_hardware(device.index())).first;
    }
    return entry->second;
}

} // namespace metatomic_tc
