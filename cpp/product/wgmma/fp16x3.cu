#include "launch.cuh"

namespace metatomic_tc::wgmma {

METATOMIC_TC_INSTANTIATE_WGMMA(Fp16x3);

} // namespace metatomic_tc::wgmma
