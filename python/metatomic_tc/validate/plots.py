"""The plots of a report, as PNG."""

import base64
import io

import numpy as np

from . import smoothness


def picture(figure) -> str:
    """A figure as the address of an image inside of a page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _figure(width: float = 8, height: float = 4.2, **options):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**options)


def _style(number: int) -> dict:
    lines = ["-", "--", "-.", ":"]
    return {"color": f"C{number % 10}", "linestyle": lines[number % 4], "linewidth": 1.3}


def pull_off(results: dict, modes: list[str], structure: str) -> str:
    """The curve, how far the modes are from FP64 along it, and the same at the scale of FP32."""
    curves = {name: results[name][structure] for name in results if structure in results[name]}
    label = "FP64" if smoothness.REFERENCE in curves else "FP32"
    reference = curves[smoothness.REFERENCE if label == "FP64" else "fp32"]
    heights = reference["heights"]
    figure, (whole, all_modes, zoomed) = _figure(height=9, nrows=3, sharex=True)
    shifted = np.array(reference["energies"]) - reference["energies"][-1]
    whole.plot(heights, shifted, "k-", linewidth=1.3)
    whole.set_ylim(top=min(shifted.max(), 3.0) + 0.2)
    scale = 1e-6
    for number, mode in enumerate(modes):
        if mode in curves:
            deviation = 1e3 * (np.array(curves[mode]["energies"]) - reference["energies"])
            deviation -= deviation.mean()
            if mode == "fp32":
                scale = max(scale, 4 * np.abs(deviation).max())
            for axes in (all_modes, zoomed):
                axes.plot(heights, deviation, marker=".", label=mode, **_style(number))
    whole.set(ylabel="energy, eV", title=f"{structure}: energy since the last point, {label}")
    all_modes.set(ylabel="meV", title=f"deviation of the modes from {label}, less its mean")
    all_modes.legend()
    zoomed.set(xlabel="height, Å", ylabel="meV", ylim=(-scale, scale), title="the same, zoomed")
    return picture(figure)


def conservation(results: dict, modes: list[str], structure: str) -> str:
    """The total energy over time."""
    figure, axes = _figure()
    for number, mode in enumerate(modes):
        run = results.get(mode, {}).get(structure)
        if run:
            label = f"{mode}: {run['drift']:+.2g} ± {run['drift_uncertainty']:.1g} meV/atom/ps"
            axes.plot(run["times"], run["changes"], label=label, **_style(number))
    axes.set(xlabel="time, ps", ylabel="meV/atom", title=f"{structure}: change of the total energy")
    axes.legend()
    return picture(figure)


def relaxation(results: dict, modes: list[str], optimizer: str, fmax: float) -> str:
    """The largest force after each step."""
    figure, axes = _figure()
    for number, mode in enumerate(modes):
        label = mode
        for run in results.get(mode, {}).values():
            if run["optimizer"] == optimizer:
                axes.plot(run["forces"], label=label, **_style(number))
                label = None
    axes.axhline(fmax, color="0.5", linewidth=1)
    axes.set(yscale="log", xlabel="step", ylabel="largest force, eV/Å", title=optimizer)
    axes.legend()
    return picture(figure)


def errors(results: dict, names: list[str]) -> str:
    """RMS errors of forces, for each structure."""
    figure, axes = _figure(height=3.6)
    structures = list(dict.fromkeys(s for name in names for s in results.get(name, {})))
    for number, name in enumerate(names):
        values = [results.get(name, {}).get(s, {}).get("force_rms") for s in structures]
        points = [(i, v) for i, v in enumerate(values) if v]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, "osD^v<>pX*"[number % 10], color=f"C{number % 10}", label=name)
    axes.set_xticks(range(len(structures)), structures, fontsize=8)
    axes.set(yscale="log", ylabel="eV/Å", title="RMS error of the forces")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return picture(figure)
