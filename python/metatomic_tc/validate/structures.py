"""The structures of a validation: those that come with the package, and files of the user."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .._elements import symbol
from ..model_files import first_line

DIRECTORY = Path(__file__).with_name("structures")
#: What comes with the package, each in a file of its name
DEFAULTS = {
    "water-192": "64 water molecules, 1.00 g/cc, after about 1.2 ps at 300 K",
    "pt111-co": "CO on top of a Pt(111) slab of 4 x 4 x 4 atoms",
    "cantor-128": "(100) slab of Co-Cr-Fe-Mn-Ni, rattled",
    "cantor-539": "(100) slab Co108 Cr108 Fe108 Mn107 Ni108, rattled",
    "water-24": "8 water molecules in a small box, near a minimum of the demo model",
    "pt-co-29": "CO on a Pt(111) slab of 27 atoms",
    "alloy-32": "32 atoms of fcc Co-Cr-Fe-Mn-Ni, rattled",
}


class StructureError(ValueError):
    """A structure cannot be used. The message names it and says why."""


@dataclass(frozen=True)
class Structure:
    """Atoms with the name that they have in the report."""

    name: str
    #: an `ase.Atoms` whose positions and cell are numbers of FP32, so that no mode rounds them
    atoms: object

    def check_elements(self, types: list[int]) -> None:
        """
        Check that a model knows all elements.

        :param types: the atomic types of the model
        :raises StructureError: if it does not
        """
        unknown = sorted(set(self.atoms.numbers.tolist()) - set(types))
        if unknown:
            raise StructureError(
                f"{self.name}: the model does not know {', '.join(map(symbol, unknown))}; "
                f"it knows {', '.join(map(symbol, types))}"
            )

    @property
    def has_stress(self) -> bool:
        """Whether the cell is periodic in all directions."""
        return bool(self.atoms.pbc.all()) and abs(np.linalg.det(self.atoms.cell)) > 1e-6


def load(source: str | os.PathLike, frames: str = ":") -> list[Structure]:
    """
    Read structures.

    :param source: a name of :data:`DEFAULTS`, or a file that ASE can read
    :param frames: which, as in ASE
    :raises StructureError: if they cannot be read
    """
    import ase.io

    path = Path(source)
    if str(source) in DEFAULTS:
        path = DIRECTORY / f"{source}.xyz"
    elif not path.is_file():
        raise StructureError(
            f"{source}: there is no such file, and the structures that come with metatomic-tc "
            f"are {', '.join(DEFAULTS)}"
        )
    try:
        found = ase.io.read(path, frames)
    except Exception as error:
        reason = first_line(f"{type(error).__name__}: {error}")
        raise StructureError(f"{source}: ASE cannot read it ({reason})") from error
    found = found if isinstance(found, list) else [found]
    if not found or any(len(atoms) == 0 for atoms in found):
        raise StructureError(f"{source}: there are no atoms in it")
    name = str(source) if str(source) in DEFAULTS else path.name
    names = [name] if len(found) == 1 else [f"{name} #{i}" for i in range(len(found))]
    return [Structure(*pair) for pair in zip(names, map(rounded, found), strict=True)]


def load_one(source: str | os.PathLike) -> Structure:
    """The first structure of a file."""
    return load(source, "0")[0]


def rounded(atoms):
    """A copy without calculator, constraints and momenta whose coordinates are numbers of FP32."""
    import ase

    return ase.Atoms(
        numbers=atoms.numbers,
        positions=atoms.positions.astype(np.float32).astype(float),
        cell=np.array(atoms.cell).astype(np.float32).astype(float),
        pbc=atoms.pbc,
    )


def reordered(structure: Structure, seed: int) -> tuple[Structure, np.ndarray]:
    """
    The same atoms in another order.

    :return: the new structure, and ``places``: atom i of the old one is atom ``places[i]``
    """
    order = np.random.default_rng(seed).permutation(len(structure.atoms))
    return Structure(structure.name, structure.atoms[order]), np.argsort(order)
