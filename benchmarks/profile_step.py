"""Lists the GPU kernels of one MD step (energy, forces, virial) of PET.

    python benchmarks/profile_step.py --size s --atoms 17280 --mode tf32x3

Modes as in md_step.py. Prints the kernels by total time with their calls, the time between the
first and the last, and how much of it they take; --out writes the same as JSON, --picture a
timeline as PNG, and --trace one for chrome://tracing or https://ui.perfetto.dev.
"""

import argparse
import collections
import json
import pathlib
import warnings

#: the rows of the picture: what a kernel belongs to by a part of its name, the first that fits
GROUPS = {
    "matrix products": ("wgmma", "gemm", "cutlass", "cublas", "mma_bf16", "splitK"),
    "attention": ("::Attention",),
    "other operators of the backend": ("metatomic_tc::pet",),
    "PyTorch": ("at::native", "at_cuda_detail", "elementwise"),
    "the rest": ("",),
}


def group_of(kernel):
    return next(group for group, parts in GROUPS.items() if any(part in kernel for part in parts))


def draw(path, title, spans):
    """A timeline of ``(start, end, kernel)`` in µs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    begin = min(start for start, _, _ in spans)
    figure, axes = pyplot.subplots(figsize=(12, 3), layout="constrained")
    names = list(GROUPS)
    for row, name in enumerate(names):
        bars = [
            ((start - begin) / 1e3, (end - start) / 1e3)
            for start, end, kernel in spans
            if group_of(kernel) == name
        ]
        axes.broken_barh(bars, (row - 0.4, 0.8), color=f"C{row}")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title)
    figure.savefig(path, dpi=120)


def main(arguments):
    warnings.filterwarnings("ignore")
    import torch
    from md_step import build_system, make_step, one_pass_tf32
    from metatomic.torch import ModelEvaluationOptions, ModelOutput

    options = ModelEvaluationOptions(
        length_unit="angstrom", outputs={"energy": ModelOutput(unit="eV", sample_kind="atom")}
    )
    system = build_system(arguments.size, arguments.atoms, 0, "cuda")
    with one_pass_tf32(arguments.mode):
        step = make_step(arguments.mode, arguments.size, system, 0, options)
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            step()
            torch.cuda.synchronize()
    if arguments.trace:
        profiler.export_chrome_trace(arguments.trace)

    kernels = collections.defaultdict(lambda: [0, 0.0])
    spans = []
    for event in profiler.events():
        # the ranges of PET's record_function are no kernels
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            start, end = event.time_range.start, event.time_range.end
            kernels[event.name][0] += 1
            kernels[event.name][1] += (end - start) / 1e3
            spans.append((start, end, event.name))
    total = (max(span[1] for span in spans) - min(span[0] for span in spans)) / 1e3
    busy = sum(ms for _, ms in kernels.values())
    rows = [
        {"kernel": name, "calls": calls, "ms": round(ms, 4)}
        for name, (calls, ms) in sorted(kernels.items(), key=lambda item: -item[1][1])
    ]
    print(
        f"PET-{arguments.size.upper()}, {arguments.atoms} atoms, {arguments.mode}: {total:.2f} ms "
        f"from the first kernel to the last, {busy:.2f} ms in {len(spans)} kernels and copies"
    )
    if arguments.picture:
        title = f"PET-{arguments.size.upper()}, {arguments.atoms} atoms, {arguments.mode}"
        draw(arguments.picture, f"{title}, {torch.cuda.get_device_name()}", spans)
    for row in rows[: arguments.rows]:
        print(f"{row['ms']:9.3f} ms {row['calls']:5}  {row['kernel'][:150]}")
    if arguments.out:
        record = {
            "model": arguments.size, "atoms": arguments.atoms, "mode": arguments.mode,
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
            "span_ms": round(total, 4), "busy_ms": round(busy, 4), "kernels": rows,
        }  # fmt: skip
        pathlib.Path(arguments.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="s", help="size of PET: xs, s, m, l (default s)")
    parser.add_argument("--atoms", type=int, default=17280, help="a multiple of 192")
    parser.add_argument("--mode", default="tf32x3", help="a mode of md_step.py (default tf32x3)")
    parser.add_argument("--rows", type=int, default=45, help="kernels to print (default 45)")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--picture", help="PNG of the timeline to write")
    parser.add_argument("--trace", help="timeline file to write")
    main(parser.parse_args())
