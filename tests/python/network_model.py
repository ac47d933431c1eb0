# ruff: noqa: UP006, UP035, UP045 (metatomic checks the annotations, and wants those of typing)
"""A small metatomic model of H and O for tests of validate.

network_model.py PATH KIND writes one of the kinds: "float32", "float64", "no forces" (the energy
cannot be differentiated), "no energy", or "only float32" (an exception in FP64).
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

CUTOFF = 4.0


class Network(torch.nn.Module):
    """A network of three layers, of radial functions of the distances, for each atom."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.cutoff = CUTOFF
        self.output = "feature" if kind == "no energy" else "energy"
        self.first = torch.nn.Linear(32, 128)
        self.second = torch.nn.Linear(128, 64)
        self.last = torch.nn.Linear(64, 1)
        self.register_buffer("centers", torch.linspace(0.5, CUTOFF, 32))

    def requested_neighbor_lists(self) -> List[NeighborListOptions]:
        return [NeighborListOptions(self.cutoff, True, True)]

    def forward(
        self,
        systems: List[System],
        outputs: Dict[str, ModelOutput],
        selected_atoms: Optional[Labels],
    ) -> Dict[str, TensorMap]:
        system = systems[0]
        pairs = system.get_neighbor_list(self.requested_neighbor_lists()[0])
        distance = torch.linalg.vector_norm(pairs.values.reshape(-1, 3), dim=1)
        if self.kind == "only float32" and distance.dtype == torch.float64:
            raise RuntimeError("this model is for FP32 only")
        switch = (1.0 - (distance / self.cutoff) ** 2) ** 3
        radial = torch.exp(-2.0 * (distance[:, None] - self.centers) ** 2) * switch[:, None]
        density = torch.zeros(len(system), 32, dtype=distance.dtype, device=distance.device)
        density = density.index_add(0, pairs.samples.column("first_atom").to(torch.long), radial)
        hidden = torch.tanh(self.second(torch.tanh(self.first(density))))
        energy = self.last(hidden)
        if self.kind == "no forces":
            energy = energy.detach()

        atoms = torch.arange(len(system), device=energy.device)
        if selected_atoms is not None:
            atoms = selected_atoms.column("atom").to(torch.long)
        samples = torch.stack([torch.zeros_like(atoms), atoms], dim=1).to(torch.int32)
        zero = torch.zeros(1, 1, dtype=torch.int32, device=energy.device)
        block = TensorBlock(
            energy[atoms], Labels(["system", "atom"], samples), [], Labels("energy", zero)
        )
        return {self.output: TensorMap(Labels("_", zero), [block])}


def main(path: str, kind: str) -> None:
    dtype = "float64" if kind == "float64" else "float32"
    model = Network(kind).to(getattr(torch, dtype)).eval()
    unit = "" if model.output == "feature" else "eV"
    capabilities = ModelCapabilities(
        outputs={model.output: ModelOutput(unit=unit, sample_kind="atom")},
        atomic_types=[1, 8],
        interaction_range=CUTOFF,
        length_unit="angstrom",
        supported_devices=["cpu", "cuda"],
        dtype=dtype,
    )
    AtomisticModel(model, ModelMetadata(name="network"), capabilities).save(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
