"""Hardware counters of the kernels for compute capability 9.0: which unit of the GPU bounds them.

    python benchmarks/wgmma_counters.py          (writes results/wgmma_counters-<gpu>-<date>.json)

Runs itself under Nsight Compute (`ncu`), one launch for each mode and shape, and prints how busy
each unit was. The share of a unit times the duration is the time that the product would take if
nothing but this unit bounded it. The clocks are left alone. A second pass without the profiler runs
every product for a while, for its time, clock and power under load: the profiler idles between its
passes, so a GPU that is short of power shows only there.

Counters that this GPU or this version of ncu does not have are named, and left out.
"""

import argparse
import csv
import datetime
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: M, N, K: layers of PET-S with one row for each edge, and of its nodes, at 17,280 atoms
SHAPES = [(475200, 768, 256), (458000, 256, 512), (17280, 4096, 1024), (17280, 1024, 2048)]
BASELINE = "cublas-fp32"
#: implementation: part of the name of its kernel, products, and multiply-adds that the Tensor Cores
#: of a multiprocessor do in a cycle
MODES = {
    "tf32x3": ("Tf32x3", 3, 1024),
    "fp16x3": ("Fp16x3", 3, 2048),
    "bf16x6": ("Bf16x6", 6, 2048),
    "bf16x9": ("Bf16x9", 9, 2048),
}
#: the kernels of the modes, and those of cuBLAS
KERNELS = "regex:multiply_kernel|gemm|nvjet"

ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
#: unit: percent of its peak over the whole duration, the first that exists
UNITS = {
    "tensor": ["sm__pipe_tensor_cycles_active", "sm__pipe_tensor_op_hmma_cycles_active"],
    "issue": ["sm__inst_issued", "sm__inst_executed"],
    "fma": ["sm__pipe_fma_cycles_active", "sm__inst_executed_pipe_fma"],
    "alu": ["sm__pipe_alu_cycles_active", "sm__inst_executed_pipe_alu"],
    "shared": ["l1tex__data_pipe_lsu_wavefronts", "l1tex__data_pipe_lsu_wavefronts_mem_shared"],
    "l1": ["l1tex__throughput"],
    "l2": ["lts__throughput"],
    "dram": ["dram__throughput"],
}
STALLS = (
    "barrier branch_resolving dispatch_stall drain gmma imc_miss lg_throttle long_scoreboard "
    "math_pipe_throttle membar mio_throttle misc no_instruction not_selected selected "
    "short_scoreboard sleeping tex_throttle wait"
).split()
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS = [
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.max",
    "sm__cycles_elapsed.avg.per_second",
    "sm__inst_executed_pipe_tensor_op_gmma" + ELAPSED,
    "sm__inst_executed_pipe_lsu" + ELAPSED,
    "sm__inst_executed_pipe_xu" + ELAPSED,
    "l1tex__data_bank_reads" + ELAPSED,
    "l1tex__data_bank_writes" + ELAPSED,
    "l1tex__m_xbar2l1tex_read_bytes.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "lts__t_bytes.sum",
    "lts__t_sector_hit_rate.pct",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "smsp__inst_executed.sum",
    "smsp__warps_active.avg.per_cycle_active",
    "smsp__warps_eligible.avg.per_cycle_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_dynamic",
    "launch__grid_size",
    "launch__occupancy_limit_registers",
    "launch__occupancy_limit_shared_mem",
]
METRICS += [name + ELAPSED for names in UNITS.values() for name in names]
METRICS += [STALL.format(reason) for reason in STALLS]
#: what a version of ncu that refuses the list above is asked for instead
SECTIONS = (
    "SpeedOfLight ComputeWorkloadAnalysis MemoryWorkloadAnalysis SchedulerStats WarpStateStats "
    "LaunchStats Occupancy"
).split()


# ---- the products -------------------------------------------------------------------------------


def prepared_products():
    """Yields M, N, K, implementation and a function that launches the product, one by one."""
    import torch
    from metatomic_tc.bench.cases import Case
    from metatomic_tc.bench.gemm import full_fp32
    from metatomic_tc.bench.implementations import Implementations

    device = torch.device("cuda")
    implementations = Implementations(device, list(MODES))
    with torch.no_grad(), full_fp32():
        for M, N, K in SHAPES:
            a, w = torch.randn(M, K, device=device), torch.randn(N, K, device=device)
            case = Case(M, N, K, "forward", None, [])
            for name in [BASELINE, *MODES]:
                product = implementations.prepare(name, case, a, w)
                yield M, N, K, name, lambda product=product, a=a, w=w: product.function(a, w)
            del a, w, product
            torch.cuda.empty_cache()


def launch_once():
    """What runs under the profiler."""
    import torch

    for _, _, _, _, launch in prepared_products():
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        launch()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def under_load(seconds):
    """Yields a record of each product: time, clock in MHz and power in W after `seconds` of it."""
    import torch

    def sample(query):
        try:
            return query()
        except Exception:  # needs the NVIDIA management library and its Python package
            return None

    for M, N, K, name, launch in prepared_products():
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        launch()
        torch.cuda.synchronize()
        start, launches, clocks, powers = time.perf_counter(), 0, [], []
        events[0].record()
        while time.perf_counter() < start + seconds:
            for _ in range(10):
                launch()
            launches += 10
            clocks.append(sample(torch.cuda.clock_rate))
            powers.append(sample(lambda: torch.cuda.power_draw() / 1000))
            # so that the queue is never more than ten launches behind
            marker = torch.cuda.Event()
            marker.record()
            launch()
            launches += 1
            marker.synchronize()
        events[1].record()
        events[1].synchronize()
        late = [c for c in clocks[len(clocks) // 2 :] if c]
        yield {
            "M": M, "N": N, "K": K, "implementation": name,
            "ms": events[0].elapsed_time(events[1]) / launches,
            "clock_mhz": sum(late) / len(late) if late else None,
            "power_w": max([p for p in powers if p], default=None),
        }  # fmt: skip


# ---- the profiler -------------------------------------------------------------------------------


def find_ncu():
    found = shutil.which("ncu")
    places = ["/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu"]
    candidates = sorted(str(path) for place in places for path in Path("/").glob(place[1:]))
    if not found and not candidates:
        sys.exit("ncu of Nsight Compute was found neither on PATH nor in /usr/local/cuda")
    return found or candidates[-1]


def existing(ncu):
    """The metrics to ask for, and those that ncu does not know here."""
    try:
        command = [ncu, "--query-metrics"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except subprocess.TimeoutExpired:
        listed = ""
    known = {words[0] for line in listed.splitlines() if (words := line.split())}
    # properties of the launch are in another list
    is_known = lambda name: name.startswith("launch__") or name.split(".")[0] in known  # noqa: E731
    if not any(map(is_known, ["gpu__time_duration", "sm__cycles_elapsed"])):
        print("ncu --query-metrics lists nothing that is asked for, so all of it is tried.")
        return METRICS, []
    return [m for m in METRICS if is_known(m)], [m for m in METRICS if not is_known(m)]


def profile(ncu, what, limit):
    """Launches the products under ncu, and returns {column: value} of each kernel."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "ncu.csv"
        command = [ncu, *what, "--csv", "--page", "raw", "--print-units", "base"]
        command += [
            "--log-file",
            str(log),
            "--clock-control",
            "none",
            "--profile-from-start",
            "off",
        ]
        command += ["--kernel-name-base", "demangled", "--kernel-name", KERNELS]
        command += ["--launch-count", str(4 * len(SHAPES) * len(MODES))]
        command += [sys.executable, str(Path(__file__).resolve()), "--launch-once"]
        try:
            finished = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            output = finished.stdout + finished.stderr
        except subprocess.TimeoutExpired as error:
            output = f"ncu was ended after its limit of {limit} s.\n{error.output or ''}"
        text = log.read_text() if log.exists() else ""
    rows = parse(text)
    if not rows:
        print(f"ncu gave no counters:\n{text[-3000:]}\n{output[-3000:]}", file=sys.stderr)
    return rows


def parse(text):
    """The rows of `ncu --csv --page raw`, which has a line of units below its header."""
    lines = text.splitlines()
    headers = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if not headers:
        return []
    table = [line for line in lines[headers[0] :] if line.startswith('"')]
    return [row for row in csv.DictReader(table) if row["ID"]]


def number(row, name):
    """A value of a row, or None where there is none."""
    try:
        return float(row[name].replace(",", ""))
    except (KeyError, AttributeError, ValueError):
        return None


def records_of(rows, multiprocessors):
    """A record of counters for each launch; the kernels come in the order of the launches."""
    rows = list(rows)
    for M, N, K in SHAPES:
        for name in [BASELINE, *MODES]:
            kernel, products, rate = MODES.get(name, (None, None, None))

            def is_wanted(row, kernel=kernel):
                found = re.search(r"multiply_kernel<\S*?(\w+),", row["Kernel Name"])
                is_mode = "multiply_kernel" in row["Kernel Name"]
                if kernel is None:
                    return not is_mode
                return is_mode and (found is None or found[1].startswith(kernel))

            place = next((i for i, row in enumerate(rows) if is_wanted(row)), None)
            if place is None:
                print(f"ncu has no kernel of {name} at {M} x {N} x {K}.")
                continue
            row = rows[place]
            rows = rows[place + 1 :]
            record = {"M": M, "N": N, "K": K, "implementation": name}
            record["kernel"] = row["Kernel Name"][:120]
            duration = number(row, "gpu__time_duration.sum")
            record["profiled_ms"] = duration and duration * 1e-6
            record["profiled_cycles"] = cycles = number(row, "sm__cycles_elapsed.max")
            record["percent"] = {}
            for unit, names in UNITS.items():
                values = [number(row, metric + ELAPSED) for metric in names]
                record["percent"][unit] = next((v for v in values if v is not None), None)
            if products and cycles:
                # not counted, but what the products take at the full rate of the Tensor Cores
                needed = products * M * N * K / (rate * multiprocessors)
                record["percent"]["nominal"] = 100 * needed / cycles
            stalls = {reason: number(row, STALL.format(reason)) for reason in STALLS}
            found = {reason: value for reason, value in stalls.items() if value}
            record["stalls"] = dict(sorted(found.items(), key=lambda item: -item[1]))
            others = [name for name in row if "__" in (name or "") and "issue_stalled" not in name]
            values = {name: number(row, name) for name in others}
            record["counters"] = {name: v for name, v in values.items() if v is not None}
            yield record


# ---- the report ---------------------------------------------------------------------------------


def show(records):
    units = [*UNITS, "nominal"]

    def cell(value, digits=1):
        return f"{'-' if value is None else f'{value:.{digits}f}':>9}"

    def head(title):
        print(f"\n{title}")
        print(f"{'':32}{'ms':>9}" + "".join(f"{unit[:8]:>9}" for unit in units))

    def rows(values):
        for r in records:
            name = f"{r['M']} x {r['N']} x {r['K']} {r['implementation']}"
            if "percent" in r:
                yield r, f"{name:32}{cell(r['profiled_ms'], 3)}" + values(r)

    head("busy, percent of the duration (nominal: the Tensor Cores, from the number of products)")
    for _, line in rows(lambda r: "".join(cell(r["percent"].get(u)) for u in units)):
        print(line)

    def bounds(r):
        shares = [r["percent"].get(unit) for unit in units]
        ms = r["profiled_ms"]
        return "".join(cell(None if s is None or not ms else ms * s / 100, 3) for s in shares)

    head("ms, if nothing but this unit bounded the product")
    for _, line in rows(bounds):
        print(line)
    print("\nwarps per issued instruction, by what they wait for; instructions; registers")
    for r, _ in rows(lambda r: ""):
        stalls = ", ".join(f"{k} {v:.2f}" for k, v in list(r["stalls"].items())[:6])
        name = f"{r['M']} x {r['N']} x {r['K']} {r['implementation']}"
        instructions = r["counters"].get("smsp__inst_executed.sum")
        registers = r["counters"].get("launch__registers_per_thread")
        print(f"{name:32} {stalls}; {instructions or 0:.4g}; {registers or 0:.0f}")
    print("\nunder load: ms, times cuBLAS FP32, MHz, W, and clock of the profiled launch in MHz")
    baselines = {
        (r["M"], r["N"], r["K"]): r.get("ms") for r in records if r["implementation"] == BASELINE
    }
    for r in records:
        if r.get("ms"):
            baseline = baselines.get((r["M"], r["N"], r["K"]))
            hertz = r.get("counters", {}).get("sm__cycles_elapsed.avg.per_second")
            print(
                f"{r['M']} x {r['N']} x {r['K']} {r['implementation']}".ljust(32)
                + cell(r["ms"], 3) + cell(baseline and baseline / r["ms"], 2)
                + cell(r["clock_mhz"], 0) + cell(r["power_w"], 0) + cell(hertz and hertz / 1e6, 0)
            )  # fmt: skip


def main(arguments):
    if arguments.launch_once:
        launch_once()
        return
    ncu = find_ncu()
    if importlib.util.find_spec("metatomic_tc") is None:
        sys.exit("metatomic_tc is not installed; install it first: pip install .")
    import torch
    from metatomic_tc.files import result_path, write_atomically
    from metatomic_tc.info import versions

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("wgmma_counters.py needs a GPU of compute capability 9.0, e.g. an H100 or H200")
    start = time.monotonic()
    metrics, missing = existing(ncu)
    if missing:
        print(f"This ncu does not know: {', '.join(missing)}")
    rows = profile(ncu, ["--metrics", ",".join(metrics)], arguments.limit)
    if not rows:
        print("Trying the sections of ncu instead.")
        sections = [word for name in SECTIONS for word in ("--section", name)]
        rows = profile(ncu, sections, arguments.limit)
    print(f"counters of {len(rows)} kernels after {time.monotonic() - start:.0f} s", flush=True)

    counters = list(records_of(rows, torch.cuda.get_device_properties(0).multi_processor_count))
    path = result_path("wgmma_counters", torch.cuda.get_device_name(), arguments.output)
    common = {"gpu": torch.cuda.get_device_name(), "date": str(datetime.date.today())}
    common |= {"versions": versions(["triton"]), "ncu": os.path.realpath(ncu), "missing": missing}

    def write(records):
        lines = [json.dumps(record | common) for record in records]
        write_atomically(path, "[\n" + ",\n".join(lines) + "\n]\n")

    write(counters)  # also when the second pass fails
    key = lambda r: (r["M"], r["N"], r["K"], r["implementation"])  # noqa: E731
    found = {key(record): record for record in counters}
    records = [found.get(key(load), {}) | load for load in under_load(arguments.seconds)]
    write(records)
    show(records)
    print(f"\nwritten to {path} after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = Path(__file__).resolve().parent / "results"
    parser.add_argument("--output", default=results, help="folder of the results")
    parser.add_argument("--limit", type=int, default=150, help="seconds for ncu (default 150)")
    parser.add_argument("--seconds", type=float, default=0.5, help="under load (default 0.5)")
    parser.add_argument("--launch-once", action="store_true", help=argparse.SUPPRESS)
    main(parser.parse_args())
