#include "attention_kernel.cuh"

namespace metatomic_tc::pet {

template void launch_attention(const AttentionBackward<double> &, void *);

} // namespace metatomic_tc::pet
