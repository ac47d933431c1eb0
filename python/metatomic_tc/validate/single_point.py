"""
Errors of energy, forces and stress against FP64, of every mode and of what FP32 itself is uncertain
by: a second evaluation, and one with the atoms in another order.
"""

import numpy as np

from ..progress import Bar
from .evaluation import Evaluation
from .structures import Structure, reordered

TEST = "single_point"
#: FP32 evaluated twice, and FP32 with its atoms in another order, both against FP32
REPEATED, REORDERED = "fp32, run to run", "fp32, other atom order"


def run(context) -> None:
    """Evaluate all structures in all modes."""
    structures = context.structures(TEST, context.settings.single_point, every_frame=True)
    names = [*context.modes, REPEATED, REORDERED]
    bar = Bar("evaluations", max(1, len(structures) * len(names)))
    done = 0
    for structure in structures:
        if not structure.has_stress:
            context.results.problem(
                TEST,
                None,
                structure.name,
                f"{structure.name}: no stress, since its cell is not periodic in all directions; "
                "energy and forces are compared",
            )
        references = None
        for name in names:
            done += 1
            if context.results.get(TEST, name, structure.name) is None:
                with context.guard(TEST, name, structure.name):
                    if references is None:
                        references = _references(context, structure)
                    exact, fp32 = references
                    if exact.forces is None:
                        context.results.problem(
                            TEST,
                            None,
                            structure.name,
                            f"{structure.name}: no forces and no stress, since the energy of the "
                            "model cannot be differentiated; energies are compared",
                        )
                    result = _measure(context, structure, name, exact, fp32)
                    context.results.put(TEST, name, structure.name, result)
            bar(done)


def _references(context, structure) -> tuple[Evaluation, Evaluation]:
    fp32 = context.evaluators("fp32").evaluate(structure)
    reference = context.reference(structure)
    return (fp32 if reference is None else reference.evaluate(structure)), fp32


def _measure(context, structure, name, exact, fp32) -> dict:
    if name == "fp32":
        return differences(fp32, exact, structure)
    if name == REPEATED:
        return differences(context.evaluators("fp32").evaluate(structure), fp32, structure)
    if name == REORDERED:
        return differences(evaluate_reordered(context, structure), fp32, structure)
    found = context.evaluators(name).evaluate(structure)
    against_fp32 = differences(found, fp32, structure)
    return differences(found, exact, structure) | {
        f"{key}_from_fp32": value for key, value in against_fp32.items()
    }


def evaluate_reordered(context, structure: Structure, seed: int = 1) -> Evaluation:
    """FP32 with the atoms in another order, and the results in the old one."""
    other, places = reordered(structure, seed)
    found = context.evaluators("fp32").evaluate(other)
    energies = found.energies if len(found.energies) == 1 else found.energies[places]
    return Evaluation(
        energies, None if found.forces is None else found.forces[places], found.stress
    )


def differences(found: Evaluation, exact: Evaluation, structure: Structure) -> dict:
    """
    Errors: ``energy`` in eV per atom with its sign; ``force_*`` in eV/Å and ``stress_*`` in eV/Å³
    of all components.
    """
    atoms = len(structure.atoms)
    result = {"atoms": atoms, "energy": (found.energy - exact.energy) / atoms}
    if len(found.energies) == atoms:
        error = found.energies - exact.energies
        result["atom_energy_rms"] = float(np.sqrt(np.mean(error**2)))
    # half of the last place of an energy in FP32
    result["energy_rounding"] = float(2.0**-24 * np.abs(exact.energies).max())
    if len(found.energies) == 1:
        result["energy_rounding"] /= atoms
    for name in ("forces", "stress"):
        values = getattr(found, name), getattr(exact, name)
        if values[0] is None or values[1] is None:
            continue
        error = values[0] - values[1]
        if not np.isfinite(error).all():
            raise ArithmeticError(f"some {name} are not finite")
        name = name.removesuffix("s") if name == "forces" else name
        result[f"{name}_mean"] = float(np.abs(error).mean())
        result[f"{name}_rms"] = float(np.sqrt(np.mean(error**2)))
        result[f"{name}_max"] = float(np.abs(error).max())
    if not np.isfinite(result["energy"]):
        raise ArithmeticError("the energy is not finite")
    return result


def quantities(context) -> dict[str, dict[str, tuple[float, float]]]:
    """For each mode, what the verdicts look at: value and yardstick by quantity."""
    results = context.results
    yardsticks = [results.of(TEST, name) for name in ("fp32", REPEATED, REORDERED)]
    found: dict = {}
    for mode in context.modes:
        mine = {key: value for key, value in results.of(TEST, mode).items()}
        shared = [key for key in mine if key in yardsticks[0]]
        pairs = {}
        for quantity, pool in [
            ("energy", _root_mean_square),
            ("atom_energy_rms", _root_mean_square),
            ("force_rms", _root_mean_square),
            ("force_max", max),
            ("stress_rms", _root_mean_square),
        ]:
            # of the structures that have it in both
            keys = [k for k in shared if quantity in mine[k] and quantity in yardsticks[0][k]]
            if not keys:
                continue
            noise = [
                pool([abs(other[k][quantity]) for k in keys if quantity in other.get(k, {})] or [0])
                for other in yardsticks
            ]
            if "energy" in quantity:
                # The sum over atoms may be right by chance; that is no measure for others.
                noise += [
                    pool([yardsticks[0][k].get(name, 0) for k in keys])
                    for name in ("atom_energy_rms", "energy_rounding")
                ]
            pairs[quantity] = (pool([abs(mine[k][quantity]) for k in keys]), max(noise))
            if quantity == "force_rms":
                # a structure where the mode does worse than where it is compared on the whole
                ratios = {k: (mine[k][quantity], _noise(yardsticks, k, quantity)) for k in keys}
                pairs["force_rms_worst"] = max(
                    ratios.values(), key=lambda pair: pair[0] / max(pair[1], 1e-300)
                )
        if pairs:
            found[mode] = pairs
    return found


def _noise(yardsticks, structure: str, quantity: str) -> float:
    return max(abs(other.get(structure, {}).get(quantity, 0.0)) for other in yardsticks)


def _root_mean_square(values) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
