"""The backend of PET computes what metatrain's does: outputs, forces and virials, in FP64."""

import copy
import io
import itertools
import warnings

import ase
import ase.build
import metatensor.torch as mts
import pytest
import torch
import vesin.metatomic
from metatensor.torch import Labels, TensorBlock, TensorMap
from metatomic.torch import (
    AtomisticModel,
    ModelEvaluationOptions,
    ModelOutput,
    System,
    register_autograd_neighbors,
    systems_to_torch,
)
from metatomic_tc.models import convert_with_report
from metatomic_tc.pet import backend_of, replace, replace_backend

pytestmark = pytest.mark.filterwarnings("ignore")

TYPES = [1, 6, 8, 78]
SETTINGS = (
    "transformer_type normalization activation featurizer_type num_attention_layers adaptive "
    "cutoff_function zbl system_conditioning d_node non_conservative"
).split()
#: every pair of values of two settings is in one of them, as a test below shows; d_pet is 16
CASES = [
    ("PreLN", "RMSNorm", "SwiGLU", "feedforward", 1, "solver", "Bump", False, False, 32, False),
    ("PostLN", "LayerNorm", "SwiGLU", "feedforward", 1, None, "Cosine", False, False, 16, False),
    ("PreLN", "RMSNorm", "SiLU", "residual", 1, "solver", "Bump", True, True, 32, True),
    ("PostLN", "LayerNorm", "SiLU", "residual", 3, "grid", "Cosine", True, False, 32, True),
    ("PreLN", "RMSNorm", "SwiGLU", "feedforward", 2, "grid", "Bump", False, True, 16, False),
    ("PostLN", "RMSNorm", "SiLU", "feedforward", 3, "solver", "Cosine", False, True, 16, False),
    ("PreLN", "LayerNorm", "SwiGLU", "residual", 2, None, "Bump", True, False, 16, True),
    ("PreLN", "LayerNorm", "SwiGLU", "feedforward", 2, "solver", "Cosine", True, False, 32, False),
    ("PostLN", "RMSNorm", "SiLU", "feedforward", 2, None, "Bump", False, True, 32, True),
    ("PreLN", "LayerNorm", "SwiGLU", "residual", 3, None, "Bump", False, True, 32, False),
    ("PreLN", "RMSNorm", "SiLU", "residual", 1, "grid", "Bump", True, False, 32, True),
]


def test_the_cases_hold_every_pair_of_settings():
    for (a, first), (b, second) in itertools.combinations(enumerate(zip(*CASES, strict=True)), 2):
        wanted = set(itertools.product(set(first), set(second)))
        assert wanted == {(case[a], case[b]) for case in CASES}, (SETTINGS[a], SETTINGS[b])


# ---- models and structures -----------------------------------------------------------------------


def pet_model(
    transformer_type="PreLN",
    normalization="RMSNorm",
    activation="SwiGLU",
    featurizer_type="feedforward",
    num_attention_layers=1,
    adaptive="solver",
    cutoff_function="Bump",
    zbl=False,
    system_conditioning=False,
    d_node=32,
    non_conservative=False,
    dtype=torch.float64,
    **hypers,
):
    """A small metatrain PET in which no parameter is zero or one."""
    from metatrain.pet import PET
    from metatrain.pet.documentation import ModelHypers
    from metatrain.utils.data import DatasetInfo
    from metatrain.utils.data.target_info import get_energy_target_info, get_generic_target_info
    from metatrain.utils.hypers import init_with_defaults

    settings = init_with_defaults(ModelHypers)
    settings.update(
        cutoff=4.0,
        cutoff_width=0.7,
        d_pet=16,
        d_head=16,
        d_feedforward=32,
        num_heads=2,
        num_gnn_layers=2,
        attention_temperature=0.8,
        transformer_type=transformer_type,
        normalization=normalization,
        activation=activation,
        featurizer_type=featurizer_type,
        num_attention_layers=num_attention_layers,
        num_neighbors_adaptive=None if adaptive is None else 8,
        adaptive_cutoff_method=adaptive or "solver",
        cutoff_function=cutoff_function,
        zbl=zbl,
        system_conditioning=system_conditioning,
        d_node=d_node,
    )
    settings.update(hypers)
    energy = {"quantity": "energy", "unit": "eV"}
    targets = {"energy": get_energy_target_info("energy", energy, True, True)}
    if non_conservative:
        for name, unit, rank, sample_kind in [
            ("non_conservative_forces", "eV/Angstrom", 1, "atom"),
            ("non_conservative_stress", "eV/Angstrom^3", 2, "system"),
        ]:
            kind = {"type": {"cartesian": {"rank": rank}}, "num_subtargets": 1}
            kind |= {"quantity": "", "unit": unit, "sample_kind": sample_kind, "description": ""}
            targets[name] = get_generic_target_info(name, kind)
    info = DatasetInfo(length_unit="angstrom", atomic_types=TYPES, targets=targets)
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = PET(settings, info).eval()
        for parameter in model.backend.parameters():
            if parameter.unique().numel() == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return model.to(dtype)


def both_backends(model) -> tuple[AtomisticModel, AtomisticModel]:
    """The exported model with metatrain's backend and with ours."""
    ours = copy.deepcopy(model)
    assert replace_backend(ours) is None
    return model.export(), ours.export()


def structures() -> dict[str, ase.Atoms]:
    # one atom, whose neighbors are its own images
    crystal = ase.build.bulk("Pt", "fcc", a=3.9)
    water = ase.build.molecule("H2O")
    water.set_cell([3.1, 3.1, 3.1])
    water = water * (2, 2, 2)
    water.pbc = True
    slab = ase.build.fcc111("Pt", (2, 1, 2), a=3.95, vacuum=4.0)
    ase.build.add_adsorbate(slab, ase.build.molecule("CO"), 1.9, "ontop")
    for seed, atoms in enumerate([water, slab]):
        atoms.rattle(0.1, seed=seed)
    return {
        "crystal": crystal,
        "water": water,
        "slab": slab,
        "molecule": ase.build.molecule("CH4"),
        "no pairs": ase.Atoms("OO", [[0, 0, 0], [0, 0, 9]]),
        "one atom": ase.Atoms("H"),
        "no atoms": ase.Atoms(),
    }


ALL = ["crystal", "water", "slab", "one atom", "molecule", "no pairs"]


def systems_of(names: list[str], model: AtomisticModel, dtype=torch.float64) -> list[System]:
    """Structures with the neighbor lists, charges and spins that the model wants."""
    systems = systems_to_torch([structures()[name] for name in names], dtype=dtype)
    for system in systems:
        if len(system) > 0:
            vesin.metatomic.compute_requested_neighbors(system, "angstrom", model)
            continue
        for options in model.requested_neighbor_lists():
            system.add_neighbor_list(options, no_pairs(dtype))
    inputs = model.requested_inputs()
    for name, system in zip(names, systems, strict=True):
        for key in inputs:
            number = torch.tensor([[float(len(name) % 4 + (key != "charge"))]], dtype=dtype)
            samples = Labels("system", torch.tensor([[0]]))
            block = TensorBlock(number, samples, [], Labels(key, torch.tensor([[0]])))
            system.add_data(key, TensorMap(Labels.single(), [block]))
    return systems


def no_pairs(dtype: torch.dtype) -> TensorBlock:
    """The neighbor list of a system without pairs."""
    names = ["first_atom", "second_atom", "cell_shift_a", "cell_shift_b", "cell_shift_c"]
    return TensorBlock(
        torch.empty((0, 3, 1), dtype=dtype),
        Labels(names, torch.empty((0, 5), dtype=torch.int32)),
        [Labels.range("xyz", 3)],
        Labels.range("distance", 1),
    )


def evaluate(model, systems: list[System], outputs=("energy",), per_atom=()) -> dict:
    """Values of the outputs, and forces and virials [systems, 3, 3] of the energy."""
    strained, positions, strains = [], [], []
    for system in systems:
        positions.append(system.positions.detach().clone().requires_grad_(True))
        strains.append(torch.eye(3, dtype=system.positions.dtype, requires_grad=True))
        new = System(
            system.types, positions[-1] @ strains[-1], system.cell @ strains[-1], system.pbc
        )
        for options in system.known_neighbor_lists():
            pairs = mts.detach_block(system.get_neighbor_list(options))
            register_autograd_neighbors(new, pairs, check_consistency=False)
            new.add_neighbor_list(options, pairs)
        for key in system.known_data():
            new.add_data(key, system.get_data(key))
        strained.append(new)
    wanted = {name: ModelOutput(sample_kind="system") for name in outputs}
    wanted |= {name: ModelOutput(sample_kind="atom") for name in per_atom}
    options = ModelEvaluationOptions(length_unit="angstrom", outputs=wanted)
    with torch.jit.optimized_execution(False):
        found = model(strained, options, check_consistency=False)
    result = {name: found[name].block().values.detach() for name in wanted}
    if "energy" in found:
        energy = found["energy"].block().values.sum()
        gradients = torch.autograd.grad(energy, positions + strains, allow_unused=True)
        gradients = [
            torch.zeros_like(x) if g is None else g
            for g, x in zip(gradients, positions + strains, strict=True)
        ]
        result["forces"] = -torch.cat(gradients[: len(systems)])
        result["virials"] = -torch.stack(gradients[len(systems) :])
    return result


def assert_same(found: dict, expected: dict, relative=1e-12, absolute=1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        gradient = name in ("forces", "virials")
        torch.testing.assert_close(
            found[name],
            value,
            rtol=0 if gradient else relative,
            atol=absolute if gradient else relative,
            msg=lambda text, name=name: f"{name}: {text}",
        )


# ---- the same as metatrain's ---------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_same_as_stock(case):
    settings = dict(zip(SETTINGS, case, strict=True))
    stock, ours = both_backends(pet_model(**settings))
    systems = systems_of(ALL, stock)
    outputs = ["energy"]
    per_atom = ["feature", "mtt::aux::cutoff_stats", "mtt::aux::energy_last_layer_features"]
    if settings["non_conservative"]:
        outputs += ["non_conservative_stress"]
        per_atom += ["non_conservative_forces"]
    expected = evaluate(stock, systems, outputs, per_atom)
    found = evaluate(ours, systems, outputs, per_atom)
    assert_same(found, expected)
    assert found["forces"].abs().max() > 1e-3
    assert found["mtt::aux::cutoff_stats"][:, 1].max() > 4


def test_a_batch_equals_its_systems_alone():
    _, model = both_backends(pet_model())
    batch = evaluate(model, systems_of(ALL, model))
    first = 0
    for i, name in enumerate(ALL):
        last = first + len(structures()[name])
        expected = {key: values[i : i + 1] for key, values in batch.items()}
        expected["forces"] = batch["forces"][first:last]
        assert_same(evaluate(model, systems_of([name], model)), expected)
        first = last


@pytest.mark.parametrize("names", [["no atoms"], ["molecule", "no atoms", "water"]])
@pytest.mark.parametrize("adaptive", [None, "grid", "solver"])
def test_systems_without_atoms(names, adaptive):
    # metatrain cannot give them an energy of their own, only those of their atoms
    stock, ours = both_backends(pet_model(adaptive=adaptive))
    systems = systems_of(names, stock)
    expected = evaluate(stock, systems, [], ["energy", "feature"])
    assert_same(evaluate(ours, systems, [], ["energy", "feature"]), expected)
