#include "attention_kernel.cuh"

namespace metatomic_tc::pet {

template void launch_attention(const AttentionBackward<float> &, void *);

} // namespace metatomic_tc::pet
