# ruff: noqa: UP006, UP035, UP045 (metatomic checks the annotations, and wants those of typing)
"""A metatomic model that is not PET: a pair potential and a small network.

pair_model.py PATH TROUBLE HEIGHT DTYPE KINDS [EXTRAS] writes a `PairModel` for atoms of KINDS, as
in 1,8, in eV and Å.
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

#: eV/Å
NC_FORCE = [0.1, -0.2, 0.3]
#: xx, yy, zz in eV/Å³
NC_STRESS = [0.001, 0.002, -0.003]


class PairModel(torch.nn.Module):
    """Half a repulsive pair energy for each of two atoms, from a strict half list, and a network of
    16 radial functions for each atom, from a full list with a shorter cutoff.

    With EXTRAS it has more outputs: the energy variants "double" and "pbe0", the uncertainty of the
    energy (0.2 eV for oxygen, 0.01 eV for hydrogen), non-conservative forces (NC_FORCE for every
    atom; also as variant "pbe0") and the non-conservative stress (NC_STRESS times the number of
    atoms).

    `trouble`: "none", or what happens when a main atom is above `height`: "exception", "memory" (it
    asks for more than there is) or "nan".
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
            if self.trouble == "memory":
                energy = torch.zeros(1 << 50, dtype=energy.dtype, device=energy.device)
            energy = energy / 0.0 - energy / 0.0

        systems_of = torch.zeros(1, 1, dtype=torch.int32, device=energy.device)
        zero = torch.zeros(1, 1, dtype=torch.int32, device=energy.device)
        samples = torch.stack([torch.zeros_like(atoms), atoms], dim=1).to(torch.int32)
        of_atoms = Labels(["system", "atom"], samples)
        of_system = Labels(["system"], systems_of)
        xyz = torch.arange(3, dtype=torch.int32, device=energy.device).reshape(3, 1)
        result: Dict[str, TensorMap] = {}
        for name, output in outputs.items():
            of = of_atoms
            values = energy
            components: List[Labels] = []
            if name == "energy_uncertainty":
                oxygen = system.types[atoms] == 8
                values = torch.where(oxygen, 0.2, 0.01).to(energy.dtype).reshape(-1, 1)
            elif name.startswith("non_conservative_force"):
                force = torch.tensor([0.1, -0.2, 0.3], dtype=energy.dtype, device=energy.device)
                values = force.repeat(len(atoms), 1).reshape(-1, 3, 1)
                components = [Labels("xyz", xyz)]
            elif name == "non_conservative_stress":
                stress = torch.tensor([0.001, 0.002, -0.003], dtype=energy.dtype)
                stress = torch.diag(stress).to(energy.device) * len(atoms)
                values = stress.reshape(1, 3, 3, 1)
                components = [Labels("xyz_1", xyz), Labels("xyz_2", xyz)]
                of = of_system
            else:
                if name == "energy/double":
                    values = 2.0 * energy
                if output.sample_kind == "system":
                    values = values.sum(dim=0, keepdim=True)
                    of = of_system
            property_name = name.split("/")[0]
            block = TensorBlock(values, of, components, Labels([property_name], zero))
            result[name] = TensorMap(Labels("_", zero), [block])
        return result


def main(path, trouble, height, dtype, kinds, extras=""):
    outputs = {"energy": ModelOutput(unit="eV", sample_kind="atom")}
    if extras:
        outputs["energy/double"] = ModelOutput(unit="eV", sample_kind="atom")
        outputs["energy/pbe0"] = ModelOutput(unit="eV", sample_kind="atom")
        outputs["energy_uncertainty"] = ModelOutput(unit="eV", sample_kind="atom")
        for name in ["non_conservative_force", "non_conservative_force/pbe0"]:
            outputs[name] = ModelOutput(unit="eV/A", sample_kind="atom")
        outputs["non_conservative_stress"] = ModelOutput(unit="eV/A^3", sample_kind="system")
    capabilities = ModelCapabilities(
        outputs=outputs,
        atomic_types=[int(kind) for kind in kinds.split(",")],
        interaction_range=4.0,
        length_unit="angstrom",
        supported_devices=["cpu", "cuda"],
        dtype=dtype,
    )
    model = PairModel(trouble, float(height)).to(getattr(torch, dtype)).eval()
    AtomisticModel(model, ModelMetadata(name="pair model"), capabilities).save(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
