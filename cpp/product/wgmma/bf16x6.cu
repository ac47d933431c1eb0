#include "launch.cuh"

namespace metatomic_tc::wgmma {

METATOMIC_TC_INSTANTIATE_WGMMA(Bf16x6);

} // namespace metatomic_tc::wgmma
