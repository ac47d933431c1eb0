#include "bf16_kernel.cuh"

namespace metatomic_tc::mma_bf16 {

template void run_layout<9, false>(bool, const Gemm &, int *, cudaStream_t);

} // namespace metatomic_tc::mma_bf16
