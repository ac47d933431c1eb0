"""
A group of atoms is moved rigidly along a line, and the energy of every mode is compared with that
of FP64.

The roughness is the root mean square of the second differences, E(i-1) - 2 E(i) + E(i+1), of the
deviation from FP64: what is smooth in both cancels.
"""

import numpy as np

from ..progress import Bar
from .single_point import REORDERED, evaluate_reordered
from .structures import Structure, StructureError, rounded

TEST = "smoothness"
REFERENCE = "fp64"


def run(context) -> None:
    """Evaluate the curve in FP64 and in all modes."""
    settings = context.settings
    for structure in context.structures(TEST, [settings.pull_structure]):
        try:
            heights, path = curve(structure, settings)
        except StructureError as error:
            context.results.problem(TEST, None, structure.name, error)
            continue
        for name in [REFERENCE, *context.modes, REORDERED]:
            if context.results.get(TEST, name, structure.name) is not None:
                continue
            if name == REFERENCE and context.reference(path[0]) is None:
                continue
            bar = Bar(f"{name}: points", len(path))
            with context.guard(TEST, name, structure.name):
                energies, forces = [], []
                moved = moved_atoms(structure, settings)
                direction = np.array(settings.pull_direction)
                direction = direction / np.linalg.norm(direction)
                for number, point in enumerate(path):
                    found = _evaluate(context, name, point, number)
                    if not np.isfinite(found.energy):
                        raise ArithmeticError(
                            f"the energy at {heights[number]:.2f} Å is not finite"
                        )
                    energies.append(found.energy)
                    if found.forces is not None:
                        forces.append(float(found.forces[moved].sum(axis=0) @ direction))
                    bar(number + 1)
                result = {"heights": heights, "energies": energies, "forces": forces}
                context.results.put(TEST, name, structure.name, result)


def _evaluate(context, name: str, point: Structure, number: int):
    if name == REFERENCE:
        return context.reference(point).evaluate(point)
    if name == REORDERED:
        return evaluate_reordered(context, point, number)
    return context.evaluators(name).evaluate(point)


def moved_atoms(structure: Structure, settings) -> list[int]:
    """
    The indices of the atoms that are moved.

    :raises StructureError: if there are no such atoms, or none that stays
    """
    atoms = structure.atoms
    if settings.pull_atoms is not None:
        moved = list(settings.pull_atoms)
    else:
        moved = [i for i, kind in enumerate(atoms.get_chemical_symbols()) if kind in ("C", "O")]
        moved = moved if 0 < len(moved) < len(atoms) else [len(atoms) - 1]
    wrong = [index for index in moved if not 0 <= index < len(atoms)]
    if wrong:
        raise StructureError(
            f"{structure.name}: there is no atom {wrong[0]} to move, only 0 to {len(atoms) - 1}"
        )
    if len(set(moved)) == len(atoms):
        raise StructureError(f"{structure.name}: all atoms would move, and none stays")
    return moved


def curve(structure: Structure, settings) -> tuple[list[float], list[Structure]]:
    """The heights in Å, and the structures."""
    moved = moved_atoms(structure, settings)
    direction = np.array(settings.pull_direction, dtype=float)
    length = np.linalg.norm(direction)
    if not length > 0:
        raise StructureError(f"{structure.name}: the direction of the movement has no length")
    direction /= length
    along = structure.atoms.positions @ direction
    others = np.delete(along, moved)
    start = along[moved[0]] - others.max()
    heights = np.linspace(*settings.pull_range, settings.pull_points).tolist()
    path = []
    for height in heights:
        atoms = structure.atoms.copy()
        atoms.positions[moved] += (height - start) * direction
        path.append(Structure(structure.name, rounded(atoms)))
    return heights, path


def roughness(deviation) -> float:
    """The root mean square of the second differences."""
    return float(np.sqrt(np.mean(np.diff(deviation, 2) ** 2)))


def deviations(context, name: str, key: str = "energies") -> dict[str, np.ndarray]:
    """By structure, how far a curve is from FP64's (or, if there is none, from FP32's)."""
    references = context.results.of(TEST, REFERENCE) or context.results.of(TEST, "fp32")
    return {
        structure: np.array(result[key]) - np.array(references[structure][key])
        for structure, result in context.results.of(TEST, name).items()
        if structure in references and len(result[key]) == len(references[structure][key]) > 2
    }


def quantities(context) -> dict[str, dict[str, tuple[float, float]]]:
    """For each mode, what the verdicts look at: value and yardstick by quantity."""
    found: dict = {}
    for quantity, key, measure in [
        ("roughness", "energies", roughness),
        ("pull_force_rms", "forces", lambda deviation: float(np.sqrt(np.mean(deviation**2)))),
    ]:
        measured = {
            name: [measure(one) for one in deviations(context, name, key).values()]
            for name in [*context.modes, REORDERED]
        }
        if not measured["fp32"]:
            continue
        yardstick = max(measured["fp32"] + measured[REORDERED])
        for mode in context.modes:
            if measured[mode]:
                found.setdefault(mode, {})[quantity] = (max(measured[mode]), yardstick)
    return found
