"""PET models of the published sizes with random weights, and boxes of water to run them on."""

import ase
import numpy as np
import torch
from metatomic_tc.validate.speed import repetitions
from metatrain.pet import PET
from metatrain.pet.documentation import ModelHypers
from metatrain.utils.data import DatasetInfo
from metatrain.utils.data.target_info import get_energy_target_info
from metatrain.utils.hypers import init_with_defaults

# what differs between the sizes of PET; d_head = d_pet and d_feedforward = 2 d_pet in all of them
SIZES = {
    "xs": dict(
        d_node=512,
        d_pet=128,
        num_gnn_layers=2,
        num_attention_layers=1,
        cutoff=7.5,
        num_neighbors_adaptive=16,
    ),
    "s": dict(
        d_node=1024,
        d_pet=256,
        num_gnn_layers=3,
        num_attention_layers=1,
        cutoff=8.0,
        num_neighbors_adaptive=24,
    ),
    "m": dict(
        d_node=1536,
        d_pet=384,
        num_gnn_layers=3,
        num_attention_layers=2,
        cutoff=8.5,
        num_neighbors_adaptive=32,
    ),
    "l": dict(
        d_node=2048,
        d_pet=512,
        num_gnn_layers=4,
        num_attention_layers=2,
        cutoff=9.0,
        num_neighbors_adaptive=32,
    ),
}


def build_pet(size, seed=0):
    """A PET model for H and O with random, frozen weights, and its hyperparameters.

    The time of a step does not depend on the weights.
    """
    hypers = init_with_defaults(ModelHypers)
    hypers.update(SIZES[size])
    hypers["d_head"], hypers["d_feedforward"] = hypers["d_pet"], 2 * hypers["d_pet"]
    energy = get_energy_target_info(
        "energy",
        {"quantity": "energy", "unit": "eV"},
        add_position_gradients=True,
        add_strain_gradients=True,
    )
    torch.manual_seed(seed)
    model = PET(
        hypers, DatasetInfo(length_unit="angstrom", atomic_types=[1, 8], targets={"energy": energy})
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval(), hypers


def water(n_atoms, seed=0):
    """Water at 1 g/cc: 192 atoms (4 x 4 x 4 molecules of random orientation), repeated."""
    if n_atoms % 192 != 0:
        raise ValueError(f"{n_atoms} atoms are not a multiple of 192, the size of the repeated box")
    spacing, molecule = 3.1047, np.array([[0, 0, 0], [0.9572, 0, 0], [-0.2400, 0.9266, 0]])
    generator = np.random.default_rng(seed)
    positions = []
    for site in np.ndindex(4, 4, 4):
        rotation, _ = np.linalg.qr(generator.normal(size=(3, 3)))
        centre = spacing * np.array(site) + generator.normal(scale=0.05, size=3)
        positions.append(molecule @ rotation.T + centre)
    box = ase.Atoms("OHH" * 64, np.concatenate(positions), cell=[4 * spacing] * 3, pbc=True)
    return box.repeat(repetitions(n_atoms // 192))
