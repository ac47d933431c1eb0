#include "glu_backward.hpp"

#include "rows/launch.cuh"

namespace metatomic_tc::rows {

template void launch_rows(const GluBackward<float> &, int64_t, void *);
template void launch_rows(const GluBackward<double> &, int64_t, void *);

} // namespace metatomic_tc::rows
