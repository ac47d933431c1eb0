"""Prints the table of python/metatomic_tc/bench/pet_layers.py, from the PET models themselves.

    python benchmarks/pet_layers.py

Every size of PET (see pet_models.py) is evaluated once on 192 atoms of water on the CPU, with hooks
on its linear layers that record how many rows they get. Takes a minute.
"""

import re
import warnings

import torch
from md_step import build_system
from metatomic.torch import ModelEvaluationOptions, ModelOutput
from pet_models import SIZES, build_pet

ATOMS = 192


def linear_layers(size):
    """The linear layers of a PET model, in the order of evaluation, and its padded neighbors.

    Returns the number of neighbors that every atom is padded to, and a list of
    (name, in_features, out_features, rows, count), in which layers that differ in nothing but the
    numbers in their names are one entry, with "*" for the numbers.
    """
    model, _ = build_pet(size)
    calls = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda layer, inputs, name=name: calls.append(
                    (name.removeprefix("backend."), layer, inputs[0].numel() // layer.in_features)
                )
            )
    options = ModelEvaluationOptions(
        length_unit="angstrom", outputs={"energy": ModelOutput(unit="eV", sample_kind="atom")}
    )
    system = build_system(size, ATOMS, 0, "cpu")
    with torch.no_grad():
        model.export()([system], options, False)

    (padded,) = {rows // ATOMS for name, _, rows in calls if name.endswith("edge_embedder")}
    kinds = {ATOMS: "node", padded * ATOMS: "edge", (padded + 1) * ATOMS: "token"}
    counts = {}
    for name, layer, rows in calls:
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        key = (name, layer.in_features, layer.out_features, kinds[rows])
        counts[key] = counts.get(key, 0) + 1
    return padded, [(*key, count) for key, count in counts.items()]


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    found = {size: linear_layers(size) for size in SIZES}
    print("PADDED_NEIGHBORS =", {size: padded for size, (padded, _) in found.items()})
    print("LINEAR_LAYERS =", {size: layers for size, (_, layers) in found.items()})
