#include "mma_bf16_kernel.cuh"

namespace metatomic_tc::mma_bf16 {

template METATOMIC_TC_RUN(6, 64, true, false);

} // namespace metatomic_tc::mma_bf16
