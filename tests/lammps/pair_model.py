# ruff: noqa: UP006, UP035, UP045 (metatomic checks the annotations, and wants those of typing)
"""A metatomic model that is not PET: a pair potential and a small network.

pair_model.py PATH TROUBLE HEIGHT DTYPE writes a `PairModel` for H and O, in eV and Å.
"""

import sys
from typing import Dict, List, Optional

import torch
from metatensor.torch import Labels, TensorBlock, TensorMap
from metatomic.torch import (
    AtomisticModel,
    ModelCapabilities,
    ModelMetadata,
    ModelOutput,
    NeighborListOptions,
    System,
)


class PairModel(torch.nn.Module):
    """Half a repulsive pair energy for each of two atoms, from a strict half list, and a network of
    16 radial functions for each atom, from a full list with a shorter cutoff.

    `trouble`: "none", or what happens when a main atom is above `height`: "exception" or "nan".
    """

    def __init__(self, trouble: str, height: float):
        super().__init__()
        torch.manual_seed(0)
        self.half = 4.0
        self.full = 3.0
        self.trouble = trouble
        self.height = height
        self.hidden = torch.nn.Linear(16, 32)
        self.last = torch.nn.Linear(32, 1)
        self.register_buffer("centers", torch.linspace(0.5, 3.0, 16))

    def requested_neighbor_lists(self) -> List[NeighborListOptions]:
        return [
            NeighborListOptions(self.half, False, True),
            NeighborListOptions(self.full, True, True),
        ]

    def forward(
        self,
        systems: List[System],
        outputs: Dict[str, ModelOutput],
        selected_atoms: Optional[Labels],
    ) -> Dict[str, TensorMap]:
        system = systems[0]
        n = len(system)
        lists = self.requested_neighbor_lists()

        pairs = system.get_neighbor_list(lists[0])
        distance = torch.linalg.vector_norm(pairs.values.reshape(-1, 3), dim=1)
        switch = (1.0 - (distance / self.half) ** 2) ** 3
        pair_energy = 0.5 * (1.0 / distance) ** 4 * switch
        energy = torch.zeros(n, dtype=distance.dtype, device=distance.device)
        for name in ["first_atom", "second_atom"]:
            atoms = pairs.samples.column(name).to(torch.long)
            energy = energy.index_add(0, atoms, pair_energy)

        pairs = system.get_neighbor_list(lists[1])
        distance = torch.linalg.vector_norm(pairs.values.reshape(-1, 3), dim=1)
        switch = (1.0 - (distance / self.full) ** 2) ** 3
        radial = torch.exp(-4.0 * (distance[:, None] - self.centers) ** 2) * switch[:, None]
        density = torch.zeros(n, 16, dtype=distance.dtype, device=distance.device)
        density = density.index_add(0, pairs.samples.column("first_atom").to(torch.long), radial)
        energy = energy + self.last(torch.tanh(self.hidden(density))).reshape(-1)

        atoms = torch.arange(n, device=energy.device)
        if selected_atoms is not None:
            atoms = selected_atoms.column("atom").to(torch.long)
        energy = energy[atoms].reshape(-1, 1)
        if self.trouble != "none" and bool((system.positions[atoms, 2] > self.height).any()):
            if self.trouble == "exception":
                raise RuntimeError("an atom is too high")
            energy = energy / 0.0 - energy / 0.0

        samples = torch.stack([torch.zeros_like(atoms), atoms], dim=1).to(torch.int32)
        sample_names = ["system", "atom"]
        if outputs["energy"].sample_kind == "system":
            energy = energy.sum(dim=0, keepdim=True)
            samples = torch.zeros(1, 1, dtype=torch.int32, device=energy.device)
            sample_names = ["system"]
        zero = torch.zeros(1, 1, dtype=torch.int32, device=energy.device)
        block = TensorBlock(energy, Labels(sample_names, samples), [], Labels("energy", zero))
        return {"energy": TensorMap(Labels("_", zero), [block])}


def main(path, trouble, height, dtype):
    capabilities = ModelCapabilities(
        outputs={"energy": ModelOutput(unit="eV", sample_kind="atom")},
        atomic_types=[1, 8],
        interaction_range=4.0,
        length_unit="angstrom",
        supported_devices=["cpu", "cuda"],
        dtype=dtype,
    )
    model = PairModel(trouble, float(height)).to(getattr(torch, dtype)).eval()
    AtomisticModel(model, ModelMetadata(name="pair model"), capabilities).save(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
