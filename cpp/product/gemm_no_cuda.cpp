// Takes the place of gemm_cuda.cpp in a library built without CUDA.
#include "metatomic_tc/gemm.hpp"

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

bool fuses_activation(Implementation) {
    return false;
}

int gemm_packing(Implementation, const Gemm &) {
    return 0;
}

std::size_t gemm_packed_size(Implementation, const Gemm &) {
    refuse();
}

void gemm_pack(Implementation, const Gemm &, void *, void *) {
    refuse();
}

bool is_captured(void *) {
    return false;
}

std::size_t gemm_workspace_size(Implementation, const Gemm &) {
    refuse();
}

void gemm(Implementation, const Gemm &, void *, std::size_t, void *) {
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
