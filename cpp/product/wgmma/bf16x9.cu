#include "launch.cuh"

namespace metatomic_tc::wgmma {

METATOMIC_TC_INSTANTIATE_WGMMA(Bf16x9);

} // namespace metatomic_tc::wgmma
