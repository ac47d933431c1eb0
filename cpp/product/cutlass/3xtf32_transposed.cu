#include "cutlass_3xtf32_kernel.cuh"

namespace metatomic_tc::cutlass_3xtf32 {

template void run_layout<true>(Implementation, const Gemm &, int *, cudaStream_t);

} // namespace metatomic_tc::cutlass_3xtf32
