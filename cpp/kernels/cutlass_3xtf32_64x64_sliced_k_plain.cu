#include "cutlass_3xtf32_kernel.cuh"

namespace metatomic_tc::cutlass_3xtf32 {

template METATOMIC_TC_RUN(Threadblock64x64SlicedK, Warp32x32, 4, 4, Plain);

} // namespace metatomic_tc::cutlass_3xtf32
