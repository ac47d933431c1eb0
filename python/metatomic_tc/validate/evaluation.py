"""Energies, forces and stress of a model in a mode, and in FP64."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from .. import models
from ..model_files import ModelFileError, first_line


class NoForcesError(RuntimeError):
    """The energy of a model cannot be differentiated."""


@dataclass(frozen=True)
class Evaluation:
    """What a model says about a structure, in eV and Å, all in FP64."""

    #: energies of the atoms, or one energy of all of them
    energies: np.ndarray
    #: ``[n, 3]``; None if the model has none
    forces: np.ndarray | None
    #: ``[3, 3]`` in eV/Å³; None without forces or without a periodic cell
    stress: np.ndarray | None

    @property
    def energy(self) -> float:
        return float(self.energies.sum())


class Evaluator:
    """
    Evaluates a model. Tests may use any object with this ``mode`` and ``evaluate``.

    :param model: a metatomic model
    :param mode: the mode of its linear layers; None if it is not one of metatomic-tc
    :param device: where to run
    :param dtype: of positions and of the results of the model
    """

    def __init__(self, model, mode: str | None, device: torch.device, dtype: torch.dtype):
        self.mode = mode
        self.model = model.to(device=device, dtype=dtype)
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self._device, self._dtype = device, dtype
        self._options = _options(model)

    def evaluate(self, structure) -> Evaluation:
        """
        Energies, forces and stress of a :class:`Structure`.

        TorchScript's optimizer is off: it takes seconds for every new number of atoms, and changes
        the order of sums from one call to the next.
        """
        with torch.jit.optimized_execution(False):
            energies, forces, virial = self.step(self.system(structure))
        stress = None
        if forces is not None:
            forces = forces.double().cpu().numpy()
            if structure.has_stress:
                stress = -virial.double().cpu().numpy() / structure.atoms.get_volume()
        return Evaluation(energies.cpu().numpy().ravel(), forces, stress)

    def system(self, structure):
        """The metatomic system with its neighbor lists."""
        import vesin.metatomic
        from metatomic.torch import systems_to_torch

        system = systems_to_torch(structure.atoms, dtype=torch.float64)
        vesin.metatomic.compute_requested_neighbors(
            system, system_length_unit="angstrom", model=self.model
        )
        return system.to(dtype=self._dtype, device=self._device)

    def timed_step(self, system):
        """A function without arguments that does a step as the pair style does it."""
        from ..pet.step import Step

        (name,) = self._options.outputs
        try:
            step = Step(self.model, name, self._device)
        except ValueError:  # not PET with the backend of metatomic-tc
            return lambda: self.step(system)
        step.set_system(system)
        return lambda: step(system.positions, system.cell)

    def step(self, system) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """See :func:`step`."""
        return step(self.model, system, self._options)


def step(model, system, options) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """
    Energies in FP64, forces, and the virial, as every engine computes them.

    :param model: a metatomic model
    :param system: with the neighbor lists that it asks for
    :param options: its evaluation options, with one output
    """
    import metatensor.torch as mts
    from metatomic.torch import System, register_autograd_neighbors

    positions = system.positions.detach().clone().requires_grad_(True)
    strain = torch.eye(3, dtype=positions.dtype, device=positions.device, requires_grad=True)
    strained = System(system.types, positions @ strain, system.cell @ strain, system.pbc)
    for request in system.known_neighbor_lists():
        neighbors = mts.detach_block(system.get_neighbor_list(request))
        register_autograd_neighbors(strained, neighbors, check_consistency=False)
        strained.add_neighbor_list(request, neighbors)
    (name,) = options.outputs
    energies = model([strained], options, False)[name].block().values.double()
    if not energies.requires_grad:
        return energies, None, None
    forces, virial = torch.autograd.grad(-energies.sum(), (positions, strain))
    return energies.detach(), forces, virial


def calculator(evaluator):
    """An ASE calculator of energy and forces."""
    from ase.calculators.calculator import Calculator, all_changes

    from .structures import Structure

    class _Calculator(Calculator):
        implemented_properties = ["energy", "forces"]

        def calculate(self, atoms=None, properties=None, system_changes=all_changes):
            super().calculate(atoms, properties, system_changes)
            result = evaluator.evaluate(Structure("", self.atoms))
            if result.forces is None:
                raise NoForcesError("the model has no forces: its energy cannot be differentiated")
            self.results = {"energy": result.energy, "forces": result.forces}

    return _Calculator()


class Evaluators:
    """
    Makes the evaluators of a model, each once.

    :param path: an exported model
    :param device: where to run
    :param extensions: directory with the TorchScript extensions of the model
    """

    #: What tests validate like modes, by its name in the report: functions that make an evaluator
    #: of this object. A validation must be seen to fail what is wrong.
    others: ClassVar[dict[str, Callable]] = {}

    def __init__(self, path: Path, device: torch.device, extensions=None):
        self._path, self._device, self._extensions = path, device, extensions
        #: what makes the same in another process, without ``others``
        self.arguments = (path, device, extensions)
        self._made: dict = {}
        model = models.load(path, "fp32", extensions)
        capabilities = model.capabilities()
        self.name = model.metadata().name
        self.dtype = capabilities.dtype
        self.types = list(capabilities.atomic_types)
        self.layers = models.conversion_report(model, models.DEFAULT_MODE).layers
        self.model = model
        _options(model)

    def __call__(self, mode: str):
        """The evaluator of a mode, or of one of the ``others``."""
        if mode not in self._made:
            if mode in self.others:
                self._made[mode] = self.others[mode](self)
            else:
                model = models.load(self._path, mode, self._extensions)
                dtype = getattr(torch, self.dtype)
                self._made[mode] = Evaluator(model, mode, self._device, dtype)
        return self._made[mode]

    def mode_of(self, name: str) -> str | None:
        """The mode in which LAMMPS runs what has this name in the report."""
        return name if name not in self.others else self(name).mode

    def fp64(self, structure):
        """
        The reference evaluator: the same model with all numbers in FP64.

        :param structure: to try it with
        :raises RuntimeError: if the model cannot be converted
        """
        if "fp64" not in self._made:
            try:
                model = models.load(self._path, "fp32", self._extensions)
                evaluator = Evaluator(model, None, self._device, torch.float64)
                evaluator.evaluate(structure)
            except Exception as error:
                raise RuntimeError(
                    "the model cannot be computed in FP64, so that FP32 is the reference: "
                    + first_line(str(error).strip().splitlines()[-1])
                ) from error
            self._made["fp64"] = evaluator
        return self._made["fp64"]


def _options(model):
    from metatomic.torch import ModelEvaluationOptions, ModelOutput

    outputs = model.capabilities().outputs
    names = [name for name in outputs if name == "energy" or name.startswith("energy/")]
    if not names:
        raise ModelFileError(
            f"the model has no energy, only: {', '.join(sorted(outputs)) or 'no outputs'}; "
            "validate needs a model of energies."
        )
    name = min(names, key=len)
    kind = outputs[name].sample_kind
    return ModelEvaluationOptions(
        length_unit="angstrom", outputs={name: ModelOutput(unit="eV", sample_kind=kind)}
    )
