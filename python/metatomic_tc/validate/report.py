"""The report as a page, and its table of verdicts as text."""

import html
import math

from . import plots
from .conservation import BLOCKS
from .settings import TESTS, TITLES
from .single_point import REORDERED, REPEATED

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1b1b; background: #fff }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
caption { text-align: left; font-weight: 600; padding: 0.3rem 0 }
th, td { border: 1px solid #bbb; padding: 0.25rem 0.6rem; text-align: right; vertical-align: top }
th { background: #f2f2f2; text-align: left }
td.text { text-align: left }
.pass { background: #d9f2dd } .warn { background: #fff0c2 } .fail { background: #f9d0d0 }
img { max-width: 100%; height: auto }
.wide { overflow-x: auto }
code, pre { font-size: 0.9em; white-space: pre-wrap; overflow-wrap: anywhere }
@media print {
  body { max-width: none; margin: 0; font-size: 10pt }
  h2 { break-after: avoid } table, figure { break-inside: avoid } .wide { overflow: visible }
  .pass, .warn, .fail { print-color-adjust: exact; -webkit-print-color-adjust: exact }
}
"""


def text(data: dict) -> str:
    """The verdicts as a table, and what could not be computed."""
    head = ["mode", *(TITLES[test] for test in data["tests"])]
    lines = [head]
    for mode, found in data["verdicts"].items():
        lines.append([mode, *(found.get(test, "-") for test in data["tests"])])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    rows = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    for test, reason in data["not_judged"].items():
        rows.append(f"{TITLES[test]}: {reason}")
    for mode, tests in data["judged"].items():
        for test, found in tests.items():
            for one in found:
                if one["verdict"] != "pass":
                    rows.append(f"{mode}, {TITLES[test]}: {_words(one)}")
    return "\n".join(rows)


def page(data: dict) -> str:
    """The page, with everything in it."""
    title = f"Validation of {data['model_name'] or data['model']}"
    sections = [
        f"<h1>{_escape(title)}</h1>",
        _verdicts(data),
        _circumstances(data),
        _problems(data),
        *(_SECTIONS[test](data) for test in TESTS if test in data["tests"]),
        _rules(data),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def _verdicts(data: dict) -> str:
    rows = []
    for mode, found in data["verdicts"].items():
        cells = [found.get(test, "not judged") for test in data["tests"]]
        rows.append((mode, *cells))
    table = _table(
        "Verdict by mode and test", ["mode", *(TITLES[test] for test in data["tests"])], rows
    )
    remarks = [
        f"<li>{TITLES[test]} is not judged: {_escape(reason)}</li>"
        for test, reason in data["not_judged"].items()
    ]
    for mode, tests in data["judged"].items():
        for test, found in tests.items():
            remarks += [
                f"<li>{_escape(mode)}, {TITLES[test]}: {_escape(_words(one))}</li>"
                for one in found
                if one["verdict"] != "pass"
            ]
    if not data["finished"]:
        remarks.insert(
            0,
            "<li>The validation was interrupted: this is what was done. The same command with "
            "--resume goes on.</li>",
        )
    notes = f"<ul>{''.join(remarks)}</ul>" if remarks else ""
    return table + notes + '<p>What the words mean: <a href="#rules">Rules</a>.</p>'


def _words(one: dict) -> str:
    return (
        f"{one['quantity']} {one['verdict']}: {_number(one['value'])} {one['unit']} "
        f"(yardstick {_number(one['yardstick'])})"
    )


def _circumstances(data: dict) -> str:
    where = data["gpu"] or f"{data['device']}, where modes other than fp32 are emulated"
    rows = [
        ("model", f"{data['model']}, {data['model_dtype']}, SHA-256 {data['model_sha256'][:16]}…"),
        ("device", where),
        ("reference", "FP64" if data["reference"] == "fp64" else "FP32: there is no FP64"),
        ("date", data["date"]),
        ("versions", ", ".join(f"{k} {v}" for k, v in data["versions"].items() if v)),
    ]
    table = _table("Model, device and versions", None, rows, text=True)
    reduced = ""
    if data["reduced"]:
        items = "".join(f"<li>{_escape(line)}</li>" for line in data["reduced"])
        reduced = f"<p>Quick: smaller than the full validation.</p><ul>{items}</ul>"
    return (
        f"<h2>What was run</h2>{table}<p>Command:</p>"
        f"<pre><code>{_escape(data['command'])}</code></pre>{reduced}"
    )


def _problems(data: dict) -> str:
    if not data["problems"]:
        return ""
    rows = [
        (TITLES.get(p["test"], p["test"]), p["mode"] or "all", p["structure"], p["message"])
        for p in data["problems"]
    ]
    head = ["test", "mode", "structure", "why"]
    return "<h2>Not computed</h2>" + _table("What could not be computed", head, rows, text=True)


def _single_point(data: dict) -> str:
    results = data["results"].get("single_point", {})
    names = [name for name in [*data["modes"], REPEATED, REORDERED] if name in results]
    parts = [
        "<h2>Single point</h2><p>Errors against "
        + ("FP64" if data["reference"] == "fp64" else "FP32")
        + f"; in the rows “{REPEATED}” and “{REORDERED}” differences from FP32.</p>"
    ]
    if names:
        parts.append(
            _plot(
                lambda: plots.errors(results, names),
                "RMS error of the forces by structure and mode, on a logarithmic axis; the numbers "
                "are in the tables below.",
            )
        )
    columns = {
        "energy": "energy, eV/atom",
        "force_mean": "force mean, eV/Å",
        "force_rms": "force RMS",
        "force_max": "force max",
        "stress_mean": "stress mean, eV/Å³",
        "stress_rms": "stress RMS",
        "stress_max": "stress max",
    }
    for structure in dict.fromkeys(s for name in names for s in results[name]):
        for suffix, what in [("", ""), ("_from_fp32", ", against FP32")]:
            rows = []
            for name in names:
                found = results[name].get(structure, {})
                if suffix and f"energy{suffix}" not in found:
                    continue
                rows.append((name, *(_number(found.get(key + suffix)) for key in columns)))
            if rows:
                atoms = next(
                    results[n][structure]["atoms"] for n in names if structure in results[n]
                )
                caption = f"{structure}, {atoms} atoms{what}"
                parts.append(_table(caption, ["mode", *columns.values()], rows))
    layers = data["results"].get("layers", {})
    if layers:
        modes = [mode for mode in data["modes"] if mode in layers]
        rows = []
        for shape in dict.fromkeys(s for mode in modes for s in layers[mode]):
            cells = []
            for mode in modes:
                found = layers[mode].get(shape)
                cells.append(
                    f"{_number(found['error_rms'])} / {_number(found['error_max'])}"
                    if found
                    else "–"
                )
            rows.append((shape.replace("->", "→"), *cells))
        parts.append(
            _table(
                "Errors by layer (input → output features): RMS / largest of the products of the "
                "model's weights with random activations, in units of 2⁻²⁴·Σ|a·w|",
                ["layer", *modes],
                rows,
            )
        )
    return "".join(parts)


def _smoothness(data: dict) -> str:
    results = data["results"].get("smoothness", {})
    parts = [
        "<h2>Smoothness</h2><p>A group of atoms is moved rigidly; what matters is whether the "
        "deviation from FP64 changes from point to point.</p>"
    ]
    for structure in dict.fromkeys(s for found in results.values() for s in found):
        parts.append(
            _plot(
                lambda structure=structure: plots.pull_off(results, data["modes"], structure),
                f"{structure}: above, the energy along the curve; in the middle, the deviation of "
                "each mode from it; below, the same at the scale of FP32's deviation.",
            )
        )
    rows = _judged_rows(data, "smoothness")
    if rows:
        parts.append(
            _table(
                "Roughness (RMS second difference of the deviation, eV) and RMS error of the force "
                "along the movement (eV/Å)",
                ["mode", "quantity", "value", "yardstick", "verdict"],
                rows,
            )
        )
    return "".join(parts)


def _conservation(data: dict) -> str:
    results = data["results"].get("conservation", {})
    settings = data["settings"]
    parts = [
        "<h2>Energy conservation</h2><p>Constant energy in LAMMPS through the pair style, "
        f"{settings['nve_picoseconds']:g} ps in steps of {settings['nve_timestep']:g} fs, from the "
        "same positions and velocities in every mode. A difference of drifts below about three "
        "times its uncertainty cannot be seen in runs of this length. The uncertainty is that of a "
        f"line through the means of {BLOCKS} blocks; it is too small if a block, a tenth of the "
        "run, is shorter than the vibrations of the atoms.</p>"
    ]
    lengths = [run["picoseconds"] for found in results.values() for run in found.values()]
    if lengths and min(lengths) < settings["nve_picoseconds"] - settings["nve_timestep"] / 1000:
        parts.append(
            "<p>Interrupted before the end: the table says how long each run is. The same command "
            "with --resume goes on with them.</p>"
        )
    for structure in dict.fromkeys(s for found in results.values() for s in found):
        parts.append(
            _plot(
                lambda structure=structure: plots.conservation(results, data["modes"], structure),
                f"{structure}: change of the total energy per atom over time, one line for each "
                "mode; the drifts are in the table below.",
            )
        )
        rows = []
        for mode in data["modes"]:
            found = results.get(mode, {}).get(structure)
            if found:
                rows.append(
                    (
                        mode,
                        f"{found['picoseconds']:g}",
                        f"{_number(found['drift'])} ± {_number(found['drift_uncertainty'])}",
                        _number(found["fluctuation"]),
                        _number(found["largest"]),
                        f"{found['temperature']:.0f}",
                    )
                )
        head = ["mode", "ps", "drift, meV/atom/ps", "RMS about it, meV/atom"]
        head += ["largest change, meV/atom", "temperature, K"]
        parts.append(_table(f"{structure}: drift of the total energy", head, rows))
    return "".join(parts)


def _relaxation(data: dict) -> str:
    results = data["results"].get("relaxation", {})
    settings = data["settings"]
    parts = [
        "<h2>Relaxation</h2><p>Until no force is larger than "
        f"{settings['relax_fmax']:g} eV/Å; every repeat has another order of the atoms.</p>"
    ]
    for optimizer in settings["relax_optimizers"]:
        rows = []
        for mode in data["modes"]:
            # in the order of the repeats, whichever ended first
            found = sorted(results.get(mode, {}).items())
            runs = [run for _, run in found if run["optimizer"] == optimizer]
            if runs:
                steps = ", ".join("–" if r["steps"] is None else str(r["steps"]) for r in runs)
                within = [
                    f"{sum(r['reached_within'][str(limit)] for r in runs)} of {len(runs)}"
                    for limit in settings["relax_limits"]
                ]
                lowest = _number(min(r["lowest_force"] for r in runs))
                rows.append((mode, steps, *within, lowest))
        if rows:
            limits = [f"reached in {limit}" for limit in settings["relax_limits"]]
            parts.append(
                _plot(
                    lambda optimizer=optimizer: plots.relaxation(
                        results, data["modes"], optimizer, settings["relax_fmax"]
                    ),
                    f"{optimizer}: largest force after each step on a logarithmic axis, one line "
                    "for each mode and repeat.",
                )
            )
            head = ["mode", "steps of the repeats", *limits, "lowest largest force, eV/Å"]
            parts.append(_table(f"{settings['relax_structure']}, {optimizer}", head, rows))
    return "".join(parts)


def _speed(data: dict) -> str:
    results = data["results"].get("speed", {})
    rows = []
    for structure in dict.fromkeys(s for found in results.values() for s in found):
        for mode in data["modes"]:
            found = results.get(mode, {}).get(structure)
            if found:
                ratio = f"{found['ratio']:.2f}" if "ratio" in found else "–"
                rows.append((structure, mode, _number(found["ms"]), ratio))
    if not rows:
        return ""
    emulated = " The modes are emulated here, so that this says nothing about a GPU."
    return (
        "<h2>Speed</h2><p>Energy, forces and virial, without the neighbor list, outside of LAMMPS; "
        f"medians.{emulated if data['emulated'] else ''}</p>"
        + _table("Time of a step", ["system", "mode", "ms", "times FP32's speed"], rows)
    )


_SECTIONS = {
    "single_point": _single_point,
    "smoothness": _smoothness,
    "conservation": _conservation,
    "relaxation": _relaxation,
    "speed": _speed,
}


def _rules(data: dict) -> str:
    rows = [
        (
            TITLES[rule["test"]],
            rule["quantity"],
            rule["meaning"],
            f"{rule['passes']:g}",
            "never fails" if rule["warns"] is None else f"{rule['warns']:g}",
            f"{rule['floor']:g} {rule['unit']}" if rule["floor"] else "–",
        )
        for rule in data["rules"]
    ]
    judged = []
    for test in data["tests"]:
        judged += [(TITLES[test], *row) for row in _judged_rows(data, test)]
    head = ["test", "quantity", "what", "pass up to", "warn up to", "always passes up to"]
    return (
        '<h2 id="rules">Rules</h2><p>A quantity of a mode passes up to so many yardsticks, warns '
        "up to so many, and fails above. A yardstick is what FP32 itself does on the same model, "
        "structures and device. The verdict of a test is that of its worst quantity, and “fail” if "
        "something could not be computed that FP32 could.</p>"
        + _table("The rules, which are the same for all models", head, rows, text=True)
        + _table(
            "What they found",
            ["test", "mode", "quantity", "value", "yardstick", "verdict"],
            judged,
        )
    )


def _judged_rows(data: dict, test: str) -> list[tuple[str, ...]]:
    return [
        (
            mode,
            one["quantity"],
            f"{_number(one['value'])} {one['unit']}",
            _number(one["yardstick"]),
            one["verdict"],
        )
        for mode in data["modes"]
        for one in data["judged"][mode].get(test, [])
    ]


def _plot(draw, description: str) -> str:
    try:
        source = draw()
    except ImportError as error:
        return (
            f"<p>No plot: it needs matplotlib ({_escape(str(error))}); install it with "
            "<code>pip install 'metatomic-tc[validate]'</code> and run again with "
            "<code>--resume</code>.</p>"
        )
    return f'<figure><img src="{source}" alt="{_escape(description)}"></figure>'


def _table(caption: str, head: list[str] | None, rows: list[tuple], text: bool = False) -> str:
    """A table; the first cell of each row is its header, and words of verdicts get their color."""
    if not rows:
        return ""
    lines = [f'<div class="wide"><table><caption>{_escape(caption)}</caption>']
    if head:
        cells = "".join(f'<th scope="col">{_escape(cell)}</th>' for cell in head)
        lines.append(f"<thead><tr>{cells}</tr></thead>")
    lines.append("<tbody>")
    for first, *rest in rows:
        cells = [f'<th scope="row">{_escape(first)}</th>']
        for cell in rest:
            kind = cell if cell in ("pass", "warn", "fail") else "text" if text else ""
            cells.append(f'<td class="{kind}">' if kind else "<td>")
            cells.append(f"{_escape(cell)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join(lines) + "</tbody></table></div>"


def _escape(value) -> str:
    return html.escape(str(value))


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if value == 0 or (isinstance(value, float) and not math.isfinite(value)):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"
