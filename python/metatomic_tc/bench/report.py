"""The results of ``metatomic-tc bench gemm`` as tables, and as a picture."""

from collections import Counter
from pathlib import Path

#: Nominal TFLOP/s in FP32, and in FP16 or BF16 on dense matrices, from NVIDIA's data sheets
PEAKS = {
    "NVIDIA H100 80GB HBM3": (66.9, 989.4),
    "NVIDIA H100 NVL": (60.0, 835.5),
    "NVIDIA H100 PCIe": (51.2, 756.0),
    "NVIDIA H200": (66.9, 989.4),
    "NVIDIA H200 NVL": (60.0, 835.5),
}


def table(records: list[dict], baseline: str) -> str:
    """
    Speed by product, errors by implementation and kind of data, and what failed.

    :param records: as they are written
    :param baseline: the implementation that the ratios are relative to
    """
    sections = [_speeds(records, baseline), _errors(records)]
    failures = Counter(
        (record["implementation"], record["error"]) for record in records if "error" in record
    )
    if failures:
        lines = ["Not measured, or wrong (in how many of the records)"]
        lines += [f"  {name}: {error} ({count})" for (name, error), count in failures.items()]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _speeds(records: list[dict], baseline: str) -> str:
    rows: dict[tuple, dict[str, str]] = {}
    for record in records:
        shape = [record[key] for key in ("atoms", "direction", "M", "N", "K")]
        row = rows.setdefault(("/".join(record["model"]), *shape), {})
        name = record["implementation"]
        if record["tflops"] is None:
            row[name] = "-"
        elif name == baseline or record["ratio"] is None:
            row[name] = _number(record["tflops"])
        else:
            row[name] = f"{_number(record['tflops'])} ({record['ratio']:.2f})"
    names = list(dict.fromkeys(record["implementation"] for record in records))
    lines = [("PET", "atoms", "direction", "M", "N", "K", *names)]
    for (model, atoms, *shape), row in rows.items():
        first = (model or "-", "-" if atoms is None else str(atoms), *map(str, shape))
        lines.append((*first, *(row[name] for name in names)))
    return _aligned(f"TFLOP/s (times {baseline}); M, N, K of the product", lines)


def _errors(records: list[dict]) -> str:
    found: dict[tuple, list[dict]] = {}
    for record in records:
        if record["error_rms"] is not None:
            found.setdefault((record["implementation"], record["data"]), []).append(record)
    lines = [("implementation", "data", "rms", "max", "mean")]
    for key, group in found.items():
        largest = [
            max((record[f"error_{name}"] for record in group), key=abs)
            for name in ("rms", "max", "mean")
        ]
        lines.append((*key, *(f"{value:.3g}" for value in largest)))
    title = "Errors against FP64 in units of 2^-24 sum|a*b|, the largest of all products"
    return _aligned(title, lines)


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _aligned(title: str, lines: list[tuple[str, ...]]) -> str:
    """Columns under a title, all but words to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [title]
    for line in lines:
        cells = zip(line, widths, lines[-1], strict=True)
        aligned = [
            cell.ljust(width) if below[0].isalpha() else cell.rjust(width)
            for cell, width, below in cells
        ]
        text.append("  " + "  ".join(aligned).rstrip())
    return "\n".join(text)


def roofline(records: list[dict], gpu: str | None, bandwidth: float, path: Path) -> None:
    """
    Plot TFLOP/s over arithmetic intensity.

    :param records: as they are written
    :param gpu: name of the GPU, None for the CPU
    :param bandwidth: bytes per second that a copy reads and writes
    :param path: the picture to write
    :raises ImportError: without matplotlib
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots()
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for record in records:
        if record["tflops"] is not None and record["data"] == "normal":
            group = points.setdefault(record["implementation"], {})
            group.setdefault(record["direction"], []).append(
                (intensity(record["M"], record["N"], record["K"]), record["tflops"])
            )
    for number, (name, group) in enumerate(points.items()):
        color, marker, label = f"C{number % 10}", "osD^v<>pX*"[number % 10], name
        for direction, values in group.items():
            face = color if direction == "forward" else "none"
            x, y = zip(*values, strict=True)
            axes.plot(x, y, marker, color=color, markerfacecolor=face, markersize=5, label=label)
            label = None

    reached = [point for group in points.values() for values in group.values() for point in values]
    lowest, highest = (f([x for x, _ in reached], default=1) for f in (min, max))
    left, right = lowest / 1.5, highest * 1.5
    top = max([y for _, y in reached], default=1)
    for label, peak in ceilings(gpu):
        axes.axhline(peak, color="0.6", linewidth=0.8, zorder=0)
        axes.annotate(label, (right, peak), ha="right", va="bottom", fontsize=8, color="0.4")
        top = max(top, peak)
    # where the roof of the memory meets the upper edge
    corner = min(right, 1.5 * top * 1e12 / bandwidth)
    if corner > left:
        axes.plot(
            [left, corner],
            [1e-12 * bandwidth * x for x in (left, corner)],
            color="0.3",
            linewidth=1,
            zorder=0,
            label=f"memory, {1e-12 * bandwidth:.3g} TB/s (copy)",
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(left, right),
        ylim=(None, 1.5 * top),
        xlabel="arithmetic intensity 2MNK / 4(MK + NK + MN), FLOP/byte",
        ylabel="TFLOP/s",
        title=f"Products of PET's linear layers, {gpu or 'CPU'} (hollow: input gradient)",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    figure.savefig(path, dpi=150)


def intensity(M: int, N: int, K: int) -> float:
    """Operations of a product for each byte of its three FP32 matrices."""
    return 2 * M * N * K / (4 * (M * K + N * K + M * N))


def ceilings(gpu: str | None) -> list[tuple[str, float]]:
    """What the arithmetic units of a GPU could reach: (label, TFLOP/s); empty if not known."""
    if gpu not in PEAKS:
        return []
    fp32, half = PEAKS[gpu]
    # TF32 has half the speed of FP16, so that a third of it is a sixth of BF16.
    return [
        ("FP32", fp32),
        ("BF16 / 9", half / 9),
        ("TF32 / 3, BF16 / 6", half / 6),
        ("FP16 / 3", half / 3),
    ]
