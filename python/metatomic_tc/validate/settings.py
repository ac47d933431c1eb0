"""What a validation computes, and how much of it."""

import dataclasses
from dataclasses import dataclass

#: The tests, in the order in which they run and are reported
TESTS = ["single_point", "smoothness", "conservation", "relaxation", "speed"]
TITLES = {
    "single_point": "Single point",
    "smoothness": "Smoothness",
    "conservation": "Energy conservation",
    "relaxation": "Relaxation",
    "speed": "Speed",
}


@dataclass(frozen=True)
class Settings:
    """
    Everything that the numbers of a report depend on, besides model, modes and device. Structures
    are names of :data:`structures.DEFAULTS` or files that ASE can read.
    """

    quick: bool = False
    #: structures of the single-point test; every frame of a file
    single_point: tuple[str, ...] = ("water-192", "pt111-co", "cantor-128", "cantor-539")
    #: rows of the random activations in the errors by layer shape
    layer_rows: int = 1024

    pull_structure: str = "pt111-co"
    #: indices of the atoms that are moved as one; by default all C and O, or in a file of the user
    #: the last atom
    pull_atoms: tuple[int, ...] | None = None
    #: direction of the movement, any length
    pull_direction: tuple[float, float, float] = (0.0, 0.0, 1.0)
    #: first and last height of the first of these atoms above the highest of the others, along the
    #: direction, in Å
    pull_range: tuple[float, float] = (1.2, 6.0)
    pull_points: int = 60

    nve_structure: str = "water-192"
    nve_picoseconds: float = 30.0
    #: in fs
    nve_timestep: float = 0.5
    #: temperature of the initial velocities, in K
    nve_temperature: float = 300.0
    #: steps between two values of the total energy
    nve_every: int = 20

    relax_structure: str = "cantor-539"
    #: in eV/Å: the largest norm of a force
    relax_fmax: float = 1e-3
    #: the steps at which it is asked whether `relax_fmax` is reached; the last one ends a run
    relax_limits: tuple[int, ...] = (500, 1000)
    #: repeats, each with another order of the atoms
    relax_repeats: int = 3
    relax_optimizers: tuple[str, ...] = ("ASE FIRE2", "LAMMPS fire")

    #: numbers of atoms of water, multiples of those of `speed_structure`
    speed_structure: str = "water-192"
    speed_atoms: tuple[int, ...] = (192, 5184, 17280)
    speed_rounds: int = 5

    def as_json(self) -> dict:
        """With lists in the place of tuples, as they come back from a file."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }


def quick_settings(on_gpu: bool) -> Settings:
    """The same experiments, smaller: minutes on a GPU, and on a CPU with emulated modes."""
    if on_gpu:
        return Settings(
            quick=True,
            single_point=("water-192", "pt111-co", "cantor-128"),
            pull_points=30,
            nve_picoseconds=2.0,
            nve_every=10,
            relax_structure="cantor-128",
            relax_limits=(300, 500),
            relax_repeats=2,
            speed_atoms=(192, 5184),
            speed_rounds=3,
        )
    return Settings(
        quick=True,
        single_point=("water-24", "pt-co-29", "alloy-32"),
        layer_rows=128,
        pull_structure="pt-co-29",
        pull_points=12,
        nve_structure="water-24",
        nve_picoseconds=0.008,
        nve_every=1,
        relax_structure="alloy-32",
        relax_fmax=4.0,
        relax_limits=(10, 20),
        relax_repeats=1,
        speed_structure="water-24",
        speed_atoms=(24,),
        speed_rounds=1,
    )


def reductions(settings: Settings) -> list[str]:
    """What is smaller than in the full validation, in words."""
    full, found = Settings(), []
    for name, value in settings.as_json().items():
        if name != "quick" and value != full.as_json()[name]:
            found.append(f"{name}: {_words(value)} instead of {_words(full.as_json()[name])}")
    return found


def _words(value) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
