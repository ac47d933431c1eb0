#include "launch.cuh"

namespace metatomic_tc::wgmma {

METATOMIC_TC_INSTANTIATE_WGMMA(Tf32x3TwoParts);

} // namespace metatomic_tc::wgmma
