#include "launch.cuh"

namespace metatomic_tc::wgmma {

METATOMIC_TC_INSTANTIATE_WGMMA_TILE(Fp16x3Shared, 128);

} // namespace metatomic_tc::wgmma
