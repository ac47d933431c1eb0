#include "cutlass_3xtf32_kernel.cuh"

namespace metatomic_tc::cutlass_3xtf32 {

template METATOMIC_TC_RUN(Threadblock128x64SlicedK, Warp64x32, 3, 4, Plain);

} // namespace metatomic_tc::cutlass_3xtf32
