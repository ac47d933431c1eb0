#include "mma_bf16_kernel.cuh"

namespace metatomic_tc::mma_bf16 {

template METATOMIC_TC_RUN(9, 128, true, true);

} // namespace metatomic_tc::mma_bf16
