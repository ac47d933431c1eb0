"""One MD step of PET, on a GPU as one CUDA graph."""

import io

import torch
from metatomic.torch import AtomisticModel, System
from torch import Tensor


class Step:
    """
    Energies, forces and virial of one structure after the other, without metatomic's and
    metatrain's classes in between. On a GPU a step is one launch of a CUDA graph, which is captured
    again when a structure grows out of it. Lengths are in Å and energies in eV.

    :param model: a metatomic model in whatever mode (see :func:`metatomic_tc.load`), PET with the
        backend of metatomic-tc
    :param energy: the output that is the energy
    :param device: ``cpu``, ``cuda`` or ``cuda:N``
    :param spare: the part of arrays to have free for more atoms, pairs and edges when a graph is
        captured. By default that of the pair style: some on a GPU, and none on the CPU, where there
        is no graph. Negative: none, and no graph.
    :param lean: keep less for the backward pass, which then computes the layers once more: about
        half of the memory in 1.4 times the time
    :param uncertainty: also compute the uncertainties of the energies, of an LLPR model; see
        :attr:`uncertainties`
    :raises ValueError: if the model is another one, or the output no energy in eV
    """

    def __init__(
        self,
        model: AtomisticModel,
        energy: str = "energy",
        device: torch.device | str = "cuda",
        spare: float | None = None,
        lean: bool = False,
        uncertainty: bool = False,
    ):
        scripted = model if isinstance(model, torch.jit.ScriptModule) else torch.jit.script(model)
        buffer = io.BytesIO()
        torch.jit.save(scripted, buffer)
        content = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        self._step = torch.classes.metatomic_tc.PetStep(
            content, energy, uncertainty, torch.device(device), spare, lean
        )
        #: of the energies in the last step, in eV on the CPU; None if not asked for
        self.uncertainties: Tensor | None = None

    def set_structure(self, species: Tensor, pairs: Tensor, owned: int | None = None) -> None:
        """
        The structure of the next steps.

        :param species: ``[N]``, atomic types
        :param pairs: ``[P, 5]``, integers: first atom, second atom and the cell shift of the second
            one, as in metatomic's neighbor lists. Each pair is there once, in one direction. All
            closer than the model's cutoff now and until the next call; others do not matter.
        :param owned: the energy is that of the first so many atoms; of all by default
        :raises ValueError: if sizes do not fit
        """
        self._step.set_structure(species, pairs, len(species) if owned is None else owned)

    def set_system(self, system: System) -> None:
        """
        :meth:`set_structure` for a metatomic system, with the pairs of its neighbor list.

        :raises ValueError: if it has none, or several
        """
        lists = system.known_neighbor_lists()
        if len(lists) != 1:
            raise ValueError(f"the system must have one neighbor list, but it has {len(lists)}")
        pairs = system.get_neighbor_list(lists[0]).samples.values
        if lists[0].full_list:
            # of the two directions that in which the first number here that is not 0 is positive
            step = torch.cat([pairs[:, 1:2] - pairs[:, :1], pairs[:, 2:]], dim=1).long()
            weights = torch.tensor([10**12, 10**8, 10**4, 1], device=pairs.device)
            pairs = pairs[(step * weights).sum(dim=1) > 0]
        self.set_structure(system.types, pairs)

    def __call__(self, positions: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """
        :param positions: ``[N, 3]``, floating point
        :param cell: ``[3, 3]``, rows are the cell vectors, zeros where it is not periodic
        :return: energies of the owned atoms, forces ``[N, 3]`` and virial ``[3, 3]`` (minus the
            gradient of the energy with respect to strain), on the CPU in FP64
        :raises ValueError: if sizes do not fit
        """
        results = self._step.evaluate(positions, cell)
        energies, gradient, strain_gradient, self.uncertainties = results
        return energies, -gradient, -strain_gradient

    @property
    def captures(self) -> int:
        """How often a graph was captured."""
        return self._step.captures()

    @property
    def graph_memory(self) -> int:
        """Bytes that the graph needs while it runs; 0 without one."""
        return self._step.graph_memory()

    @property
    def graph_problem(self) -> str:
        """Why steps are not CUDA graphs, or an empty string if they are."""
        return self._step.graph_problem()
