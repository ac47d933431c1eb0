#include "attention_tf32x3.hpp"

#include "attention_tf32x3_kernel.cuh"
#include "product/cuda_status.hpp"

namespace metatomic_tc::pet {

namespace {

constexpr int warps = 4;
/// on a multiprocessor
constexpr int forward_blocks = 4, backward_blocks = 3;

template <int Columns>
__global__ void __launch_bounds__(32 * warps, forward_blocks) forward_kernel(
    Attention<float> attention, int64_t count
) {
    auto index = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
    if (index >= count) {
        return;
    }
    auto problem = tf32x3::Problem<Columns>(
        attention, index / attention.heads, static_cast<int>(index % attention.heads)
    );
    for (int first = 0; first < problem.count; first += 16) {
        problem.attend(first);
    }
}

template <int Columns>
__global__ void __launch_bounds__(32 * warps, backward_blocks) backward_kernel(
    AttentionBackward<float> backward, int64_t count
) {
    auto index = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
    if (index >= count) {
        return;
    }
    const auto &attention = backward.forward;
    auto problem = tf32x3::Problem<Columns>(
        attention, index / attention.heads, static_cast<int>(index % attention.heads)
    );
    for (int first = 0; first < problem.count; first += 16) {
        problem.query_gradients(backward, first);
    }
    // what it left in `products` is read by other lanes
    __syncwarp();
    for (int first = 0; first < problem.count; first += 16) {
        problem.key_gradients(backward, first);
    }
}

template <class Kernel, class Arguments>
void launch(Kernel kernel, const Arguments &arguments, int64_t count, void *stream) {
    if (count == 0) {
        return;
    }
    auto blocks = static_cast<unsigned>((count + warps - 1) / warps);
    kernel<<<blocks, 32 * warps, 0, static_cast<cudaStream_t>(stream)>>>(arguments, count);
    check(cudaGetLastError(), "the attention of PET");
}

} // namespace

void launch_attention_tf32x3(const Attention<float> &attention, void *stream) {
    auto kernel = attention.head_size == 16 ? forward_kernel<16> : forward_kernel<32>;
    launch(kernel, attention, attention.atoms * attention.heads, stream);
}

void launch_attention_tf32x3(const AttentionBackward<float> &attention, void *stream) {
    auto kernel = attention.forward.head_size == 16 ? backward_kernel<16> : backward_kernel<32>;
    launch(kernel, attention, attention.forward.atoms * attention.forward.heads, stream);
}

} // namespace metatomic_tc::pet
