#pragma once

#include <initializer_list>
#include <optional>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

/// What the operators of the PET backend expect of their arguments.
namespace metatomic_tc::pet {

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
          c10::GradMode::is_enabled()),
        "metatomic_tc::",
        name,
        " has no gradient for its parameter '",
        what,
        "', but that requires one; call requires_grad_(False) on the model's parameters, or train "
        "with the stock backend."
    );
}

} // namespace metatomic_tc::pet
