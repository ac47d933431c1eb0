// Takes the place of gemm_cuda.cpp in a library built without CUDA.
#include "gemm.hpp"

#include <stdexcept>

namespace metatomic_tc {

namespace {

[[noreturn]] void refuse() {
    throw std::runtime_error(
        "This build of metatomic-tc has no CUDA kernels, because no CUDA compiler (nvcc) was found "
        "when it was built; use the CPU, or install nvcc and build metatomic-tc again."
    );
}

} // namespace

void gemm_pack(const Plan &, const Gemm &, void *, void *) {
    refuse();
}

bool is_captured(void *) {
    return false;
}

void gemm(const Plan &, const Gemm &, void *, void *, void *) {
    refuse();
}

Hardware cuda_hardware(int) {
    refuse();
}

const char *cuda_architectures() {
    return "";
}

int cuda_toolkit_version() {
    return 0;
}

} // namespace metatomic_tc
