#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include "rows.hpp"
#include "stream.hpp"

/// What the operators of the PET backend share.
namespace metatomic_tc::pet {

#ifdef __x86_64__
/// Calls `work(begin, end)`, with all that it calls compiled for AVX2.
template <class Work>
[[gnu::target("avx2,fma"), gnu::flatten]] void
with_avx2(const Work &work, int64_t begin, int64_t end) {
    work(begin, end);
}
#endif

/// Calls `work(begin, end)` for parts of 0 to `count` on all cores of the CPU, with the widest
/// vectors that it is compiled for.
template <class Work> void run_on_cpu(const Work &work, int64_t count, int64_t grain_size) {
    at::parallel_for(0, count, grain_size, [&](int64_t begin, int64_t end) {
#ifdef __x86_64__
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
            with_avx2(work, begin, end);
            return;
        }
#endif
        work(begin, end);
    });
}

/// Calls `rows(row, lanes)` for `count` rows on the device of `tensor`.
template <class Rows> void run(const Rows &rows, int64_t count, const at::Tensor &tensor) {
    if (tensor.is_cuda()) {
        launch_rows(rows, count, stream_of(tensor));
        return;
    }
    auto work = [&](int64_t begin, int64_t end) {
        for (auto row = begin; row < end; row++) {
            rows(row, OneLane());
        }
    };
    run_on_cpu(work, count, 16);
}

/// Refuses indices on the CPU that are not from 0 to below `limit`; on a GPU that would take a
/// wait.
/// @param rising whether they must begin with 0 and not fall
inline void expect_indices(
    const char *name, const char *what, const at::Tensor &indices, int64_t limit, bool rising
) {
    if (!indices.is_cpu()) {
        return;
    }
    const auto *values = indices.const_data_ptr<int>();
    for (int64_t i = 0; i < indices.numel(); i++) {
        auto least = rising && i > 0 ? values[i - 1] : 0;
        auto most = rising && i == 0 ? 0 : limit - 1;
        TORCH_CHECK_VALUE(
            values[i] >= least && values[i] <= most,
            "metatomic_tc::",
            name,
            " needs '",
            what,
            "' with numbers from ",
            least,
            " to ",
            most,
            " at index ",
            i,
            ", but found ",
            values[i],
            "."
        );
    }
}

/// The arguments of one call of an operator: makes them contiguous and checks that they fit.
class Arguments {
  public:
    /// The first floating-point argument decides device and dtype of all.
    Arguments(const char *name, const at::Tensor &first)
        : name(name), first(first), guard(first.device()) {
        TORCH_CHECK_VALUE(
            first.scalar_type() == at::kFloat || first.scalar_type() == at::kDouble,
            "metatomic_tc::",
            name,
            " takes float32 or float64 tensors, but found ",
            first.scalar_type(),
            "."
        );
        TORCH_CHECK_VALUE(
            first.is_cpu() || first.is_cuda(),
            "metatomic_tc::",
            name,
            " runs on the CPU and on CUDA devices, but its arguments are on ",
            first.device(),
            "."
        );
    }

    /// @param sizes the expected ones, -1 for any
    at::Tensor
    values(const at::Tensor &tensor, const char *what, std::initializer_list<int64_t> sizes) const {
        return checked(tensor, what, first.scalar_type(), sizes);
    }

    /// @param limit the numbers are below it
    at::Tensor indices(
        const at::Tensor &tensor,
        const char *what,
        std::initializer_list<int64_t> sizes,
        int64_t limit
    ) const {
        auto result = checked(tensor, what, at::kInt, sizes);
        expect_indices(name, what, result, limit, false);
        return result;
    }

    at::Tensor integers(
        const at::Tensor &tensor, const char *what, std::initializer_list<int64_t> sizes
    ) const {
        return checked(tensor, what, at::kInt, sizes);
    }

    /// Where the rows of atoms begin among `edges`, and where the last one ends.
    at::Tensor row_starts(const at::Tensor &tensor, int64_t atoms, int64_t edges) const {
        TORCH_CHECK_VALUE(
            tensor.numel() > 0,
            "metatomic_tc::",
            name,
            " needs 'row_starts' [atoms + 1], but found none."
        );
        auto result = checked(tensor, "row_starts", at::kInt, {atoms + 1});
        expect_indices(name, "row_starts", result, edges + 1, true);
        return result;
    }

  private:
    const char *name;
    at::Tensor first;
    c10::DeviceGuard guard;

    at::Tensor checked(
        const at::Tensor &tensor,
        const char *what,
        at::ScalarType dtype,
        std::initializer_list<int64_t> sizes
    ) const {
        auto expected = at::IntArrayRef(sizes.begin(), sizes.size());
        auto fits = tensor.dim() == static_cast<int64_t>(sizes.size());
        for (int64_t i = 0; fits && i < tensor.dim(); i++) {
            fits = expected[i] == -1 || tensor.size(i) == expected[i];
        }
        TORCH_CHECK_VALUE(
            fits && tensor.scalar_type() == dtype && tensor.device() == first.device(),
            "metatomic_tc::",
            name,
            " needs '",
            what,
            "' as a ",
            dtype,
            " tensor of sizes ",
            expected,
            " (-1 is any) on ",
            first.device(),
            ", but found a ",
            tensor.scalar_type(),
            " tensor of sizes ",
            tensor.sizes(),
            " on ",
            tensor.device(),
            "."
        );
        return tensor.contiguous();
    }
};

/// Refuses a weight that requires a gradient, which no operator here has. To be called outside of
/// an autograd function, where gradients are off.
inline void
expect_frozen(const char *name, const char *what, const std::optional<at::Tensor> &weight) {
    TORCH_CHECK_VALUE(
        !(weight.has_value() && weight->defined() && weight->requires_grad() &&
          at::GradMode::is_enabled()),
        "metatomic_tc::",
        name,
        " has no gradient for its parameter '",
        what,
        "', but that requires one; call requires_grad_(False) on the model's parameters, or train "
        "with the stock backend."
    );
}

/// The gradients of an operator's outputs in its backward, which cannot be differentiated again.
class Gradients {
  public:
    Gradients(const char *name, const torch::autograd::variable_list &gradients)
        : gradients(gradients) {
        TORCH_CHECK(
            !at::GradMode::is_enabled(),
            "metatomic_tc::",
            name,
            " has no second derivative, but its gradient was asked for with "
            "create_graph=True; use the stock backend for that."
        );
        for (const auto &gradient : gradients) {
            if (gradient.defined()) {
                guard.emplace(gradient.device());
            }
        }
    }

    /// Whether all are zero.
    bool none() const {
        return !guard.has_value();
    }

    /// Undefined for zeros.
    at::Tensor operator[](size_t i) const {
        return gradients[i].defined() ? gradients[i].contiguous() : at::Tensor();
    }

  private:
    const torch::autograd::variable_list &gradients;
    std::optional<c10::DeviceGuard> guard;
};

/// What the backward of an operator with so many arguments returns: `compute(gradients, result)`
/// fills it, unless all gradients are zero.
template <class Compute>
torch::autograd::variable_list gradients_of(
    const char *name, size_t arguments, const torch::autograd::variable_list &upper, Compute compute
) {
    auto gradients = Gradients(name, upper);
    auto result = torch::autograd::variable_list(arguments);
    if (!gradients.none()) {
        compute(gradients, result);
    }
    return result;
}

/// A gradient that the kernels must find, zeros if there is none.
inline at::Tensor
or_zeros(const at::Tensor &gradient, at::IntArrayRef sizes, const at::TensorOptions &options) {
    return gradient.defined() ? gradient : at::zeros(sizes, options);
}

template <class T> const T *pointer(const at::Tensor &tensor) {
    return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

template <class T> T *output(const at::Tensor &tensor) {
    return tensor.defined() ? tensor.mutable_data_ptr<T>() : nullptr;
}

/// With data of which 16 bytes can be read at once.
inline at::Tensor aligned(const at::Tensor &tensor) {
    auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    return address % 16 == 0 ? tensor : tensor.clone();
}

/// Sets the rows of `data` [offset + edges, ...] for which there are no edges to 0.
template <class T>
void clear_spare_rows(const at::Tensor &data, const at::Tensor &row_starts, int64_t offset) {
    constexpr int64_t parts = 1024;
    auto rows = data.size(0);
    if (rows == 0) {
        return;
    }
    auto clear = ClearSpareRows<T>{
        pointer<int>(row_starts),
        row_starts.numel() - 1,
        offset,
        rows,
        data.numel() / rows,
        std::min(rows, parts),
        output<T>(data)
    };
    run(clear, clear.count, data);
}

} // namespace metatomic_tc::pet
