#include "all_rows.hpp"
#include "attention.hpp"
#include "attention_tf32x3.hpp"

#include <stdexcept>

#include "rows/no_cuda.hpp"

namespace metatomic_tc::pet {

namespace {

[[noreturn]] void fail() {
    throw std::runtime_error(
        "The attention of PET was asked to run on a GPU, but this build of metatomic-tc has no "
        "CUDA "
        "kernels; install a build with CUDA, or use the device cpu."
    );
}

} // namespace

template <class T> void launch_attention(const Attention<T> &, void *) {
    fail();
}

template <class T> void launch_attention(const AttentionBackward<T> &, void *) {
    fail();
}

void launch_attention_tf32x3(const Attention<float> &, void *) {
    fail();
}

void launch_attention_tf32x3(const AttentionBackward<float> &, void *) {
    fail();
}

template void launch_attention(const Attention<float> &, void *);
template void launch_attention(const Attention<double> &, void *);
template void launch_attention(const AttentionBackward<float> &, void *);
template void launch_attention(const AttentionBackward<double> &, void *);

} // namespace metatomic_tc::pet

namespace metatomic_tc::rows {

#define INSTANTIATE(...) template void launch_rows(const __VA_ARGS__ &, int64_t, void *);
METATOMIC_TC_FOR_ALL_ROWS(INSTANTIATE)

} // namespace metatomic_tc::rows
