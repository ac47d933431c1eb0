"""
Relaxation of a structure by ASE's FIRE2 and by LAMMPS's ``min_style fire``, several times with the
atoms in different orders, since the steps that it takes depend on rounding.
"""

import numpy as np

from . import lammps
from .evaluation import calculator
from .results import Bar
from .structures import Structure, reordered

TEST = "relaxation"
ASE, LAMMPS = "ASE FIRE2", "LAMMPS fire"


def run(context) -> None:
    """Relax in all modes."""
    settings = context.settings
    for structure in context.structures(TEST, [settings.relax_structure]):
        for optimizer in settings.relax_optimizers:
            for repeat in range(settings.relax_repeats):
                start = structure if repeat == 0 else reordered(structure, repeat)[0]
                for mode in context.modes:
                    key = f"{structure.name}, {optimizer}, {repeat + 1}"
                    if context.results.get(TEST, mode, key) is not None:
                        continue
                    bar = Bar(f"{mode}, {optimizer}, repeat {repeat + 1}", _limit(settings))
                    with context.guard(TEST, mode, key):
                        relax = _in_ase if optimizer == ASE else _in_lammps
                        forces, energy = relax(context, start, mode, bar, repeat)
                        bar(_limit(settings))
                        result = summary(forces, settings)
                        result |= {"optimizer": optimizer, "energy": energy}
                        context.results.put(TEST, mode, key, result)


def _limit(settings) -> int:
    return settings.relax_limits[-1]


def _in_ase(context, structure: Structure, mode: str, bar, repeat: int):
    from ase.optimize.fire2 import FIRE2

    atoms = structure.atoms.copy()
    atoms.calc = calculator(context.evaluators(mode))
    forces: list[float] = []
    with FIRE2(atoms, logfile=None) as optimizer:
        for _ in optimizer.irun(fmax=context.settings.relax_fmax, steps=_limit(context.settings)):
            forces.append(float(np.linalg.norm(atoms.get_forces(), axis=1).max()))
            if not np.isfinite(forces[-1]):
                raise ArithmeticError(f"the forces are not finite in step {len(forces) - 1}")
            bar(len(forces) - 1)
    return forces, atoms.get_potential_energy()


def _in_lammps(context, structure: Structure, mode: str, bar, repeat: int):
    actual = context.evaluators.mode_of(mode)
    if actual is None:
        raise ValueError(f"'{mode}' is not a mode of the pair style")
    settings = context.settings
    name = lammps.safe_name(f"relax-{structure.name}-{mode}-{repeat + 1}")
    directory = context.directory / "work" / name
    pair_style = f"{actual} {context.pair_options}"
    parts = lammps.setup(structure, pair_style, context.model, directory)
    limit = _limit(settings)
    run = lammps.Run(
        f"{parts['before']}read_data start.data\n{parts['pair']}"
        "variable norm atom sqrt(fx*fx+fy*fy+fz*fz)\ncompute fmax all reduce max v_norm\n"
        "thermo_style custom step pe c_fmax\nthermo_modify format float %.12g flush yes\n"
        "thermo 1\nmin_style fire\nmin_modify norm max\n"
        f"minimize 0.0 {settings.relax_fmax} {limit} {100 * limit}\n",
        directory,
        "relax",
    )
    run.wait()
    log = lammps.read_log(run.log)
    steps = dict(zip(map(int, log["Step"]), log["c_fmax"], strict=True))
    if not np.isfinite(list(steps.values())).all():
        raise ArithmeticError("the forces are not finite")
    return [steps[step] for step in sorted(steps)], log["PotEng"][-1]


def summary(forces: list[float], settings) -> dict:
    """
    What the report says about a run.

    :param forces: the largest force at the start and after each step, in eV/Å
    """
    reached = [step for step, force in enumerate(forces) if force <= settings.relax_fmax]
    steps = reached[0] if reached else None
    return {
        "steps": steps,
        "reached_within": {
            str(limit): steps is not None and steps <= limit for limit in settings.relax_limits
        },
        "lowest_force": min(forces),
        "forces": [float(f"{force:.4g}") for force in forces],
    }


def quantities(context) -> dict[str, dict[str, tuple[float, float]]]:
    """For each mode, what the verdicts look at: value and yardstick by quantity."""
    found: dict = {}
    target = context.settings.relax_fmax
    for mode in context.modes:
        pairs: dict = {}
        for optimizer in context.settings.relax_optimizers:
            mine, fp32 = (
                [r for r in context.results.of(TEST, name).values() if r["optimizer"] == optimizer]
                for name in (mode, "fp32")
            )
            if not mine or not fp32:
                continue
            missed = sum(run["steps"] is None for run in mine) / len(mine)
            missed -= sum(run["steps"] is None for run in fp32) / len(fp32)
            _keep_worst(pairs, "missed", (max(0.0, missed), 0.0))
            lowest = [max(target, max(r["lowest_force"] for r in runs)) for runs in (mine, fp32)]
            _keep_worst(pairs, "lowest_force", tuple(lowest))
            counts = [[r["steps"] for r in runs if r["steps"] is not None] for runs in (mine, fp32)]
            if all(counts):
                more = max(0.0, float(np.mean(counts[0]) - np.mean(counts[1])))
                spread = max(counts[1]) - min(counts[1])
                yardstick = max(0.05 * float(np.mean(counts[1])), spread, 1.0)
                _keep_worst(pairs, "steps", (more, yardstick))
        if pairs:
            found[mode] = pairs
    return found


def _keep_worst(pairs: dict, quantity: str, pair: tuple[float, float]) -> None:
    old = pairs.get(quantity)
    if old is None or pair[0] * max(old[1], 1e-300) > old[0] * max(pair[1], 1e-300):
        pairs[quantity] = pair
