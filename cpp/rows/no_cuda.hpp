#pragma once

#include <stdexcept>

#include "rows.hpp"

/// `launch_rows` for explicit instantiations in builds without CUDA.
namespace metatomic_tc::rows {

template <class Rows> void launch_rows(const Rows &, int64_t, void *) {
    throw std::runtime_error(
        "A row operation was asked to run on a GPU, but this build of metatomic-tc has no CUDA "
        "kernels; install a build with CUDA, or use the device cpu."
    );
}

} // namespace metatomic_tc::rows
