#include "all_rows.hpp"

#include "rows/launch.cuh"

namespace metatomic_tc::rows {

// Every second row is skipped, whose warp would wait for the others of its block.
template <class T> constexpr int warps<pet::ReversedPairNorm<T>> = 1;
template <class T> constexpr int warps<pet::ReversedPairNormBackward<T>> = 1;

#define INSTANTIATE(...) template void launch_rows(const __VA_ARGS__ &, int64_t, void *);
METATOMIC_TC_FOR_ALL_ROWS(INSTANTIATE)

} // namespace metatomic_tc::rows
