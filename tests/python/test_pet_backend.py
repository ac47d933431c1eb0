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
    NeighborListOptions,
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


def test_pairs_beyond_the_cutoff_and_their_order_do_not_matter():
    for adaptive in (None, "grid", "solver"):
        _, model = both_backends(pet_model(adaptive=adaptive))
        (options,) = model.requested_neighbor_lists()
        (system,) = systems_of(["slab"], model)
        expected = evaluate(model, [system])

        longer = NeighborListOptions(6.0, full_list=True, strict=True)
        (other,) = systems_to_torch([structures()["slab"]], dtype=torch.float64)
        pairs = vesin.metatomic.NeighborList(longer, "angstrom").compute(other)
        order = torch.randperm(len(pairs.samples), generator=torch.Generator().manual_seed(0))
        shuffled = TensorBlock(
            pairs.values[order],
            Labels(pairs.samples.names, pairs.samples.values[order]),
            pairs.components,
            pairs.properties,
        )
        other.add_neighbor_list(options, shuffled)
        assert len(order) > len(system.get_neighbor_list(options).samples)
        # the grid and the solver count neighbors up to their largest cutoff
        assert_same(evaluate(model, [other]), expected)


def test_selected_atoms():
    stock, ours = both_backends(pet_model())
    systems = systems_of(["slab", "water"], stock)
    atoms = Labels(["system", "atom"], torch.tensor([[0, 3], [1, 5], [1, 6]]))
    options = ModelEvaluationOptions(
        "angstrom", {"energy": ModelOutput(sample_kind="atom")}, selected_atoms=atoms
    )
    expected = stock(systems, options, check_consistency=False)["energy"].block()
    found = ours(systems, options, check_consistency=False)["energy"].block()
    assert found.samples == expected.samples
    torch.testing.assert_close(found.values, expected.values, rtol=1e-12, atol=1e-12)


def test_only_the_heads_of_requested_targets_are_evaluated():
    pet = pet_model(non_conservative=True)
    assert replace_backend(pet) is None
    called = []
    for heads in (pet.backend.node_heads, pet.backend.edge_heads):
        for name, layers in heads.items():
            layers[0].register_forward_hook(lambda *_, name=name: called.append(name))
    model = pet.export()
    systems = systems_of(["water"], model)
    evaluate(model, systems)
    assert called == ["energy", "energy"]
    called.clear()
    evaluate(model, systems, [], ["mtt::aux::energy_last_layer_features"])
    assert set(called) == {"energy", "non_conservative_forces", "non_conservative_stress"}


def test_llpr():
    from metatrain.llpr import LLPRUncertaintyModel

    pet = pet_model(non_conservative=True)
    model = LLPRUncertaintyModel({"num_ensemble_members": {"energy": 4}}, pet.dataset_info)
    model.set_wrapped_model(pet)
    model.to(torch.float64).eval()
    for name, buffer in model.named_buffers():
        if name.startswith("cholesky_"):
            buffer.copy_(torch.eye(len(buffer)) + 0.1 * torch.ones_like(buffer).tril())
    stock, ours = both_backends(model)
    assert backend_of(stock) == "stock" and backend_of(ours) == "tc"
    systems = systems_of(["slab", "water"], stock)
    outputs = ["energy", "energy_uncertainty", "energy_ensemble"]
    expected = evaluate(stock, systems, outputs)
    assert_same(evaluate(ours, systems, outputs), expected)
    assert (expected["energy_uncertainty"] > 0).all()


# ---- TorchScript, modes and dtypes ---------------------------------------------------------------


@pytest.mark.parametrize("case", [CASES[4], CASES[5], CASES[9]], ids=["grid", "PostLN", "residual"])
def test_scripted_saved_and_loaded(case):
    model = pet_model(**dict(zip(SETTINGS, case, strict=True)))
    _, ours = both_backends(model)
    systems = systems_of(ALL, ours)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(ours), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert backend_of(loaded) == "tc"
    expected = evaluate(ours, systems, ["energy"], ["feature"])
    assert_same(evaluate(loaded, systems, ["energy"], ["feature"]), expected)


def test_conversion_finds_the_layers_and_their_activations():
    stock, ours = both_backends(pet_model(dtype=torch.float32))
    converted, report = convert_with_report(ours, "tf32x3")
    _, stock_report = convert_with_report(stock, "tf32x3")
    # in each of the two GNN layers the embedder and compress.0, with its SiLU, are folded away;
    # the second one still multiplies its messages
    assert report.fused == stock_report.fused - 2 > 0
    assert len(report.layers) == len(stock_report.layers) - 3
    replaced = [layer.path.split("backend.")[1] for layer in report.layers if layer.replaced]
    assert "gnn_layers.1.compress_messages" in replaced
    assert "gnn_layers.0.layers.0.mlp.w_in" in replaced
    # and the attention, if all layers are to compute in the mode
    for layers, chosen in [("*", True), ("*gnn*", False)]:
        module, _ = convert_with_report(ours, "tf32x3", layers)
        layer = module.module.backend.gnn_layers.__getattr__("0").layers.__getattr__("0")
        (line,) = [x for x in layer.attention.code.splitlines() if "pet_attention(" in x]
        assert ('"tf32x3"' in line) == chosen
    systems = systems_of(["water"], ours, torch.float32)
    assert_same(evaluate(converted, systems), evaluate(ours, systems), 1e-5, 1e-4)


def test_float32_is_as_accurate_as_stock():
    exact, _ = both_backends(pet_model())
    expected = evaluate(exact, systems_of(ALL, exact), [], ["energy", "feature"])
    errors = []
    for model in both_backends(pet_model(dtype=torch.float32)):
        found = evaluate(model, systems_of(ALL, model, torch.float32), [], ["energy", "feature"])
        errors.append({k: (found[k] - expected[k]).pow(2).mean().sqrt() for k in expected})
    for name, stock_error in errors[0].items():
        # there are few virials
        assert errors[1][name] <= (2 if name == "virials" else 1.5) * stock_error, name


# ---- what it does not do -------------------------------------------------------------------------


def test_pairs_in_one_direction_are_an_error():
    _, model = both_backends(pet_model(adaptive=None))
    (system,) = systems_of(["water"], model)
    (options,) = model.requested_neighbor_lists()
    pairs = system.get_neighbor_list(options)
    half = TensorBlock(
        pairs.values[1:],
        Labels(pairs.samples.names, pairs.samples.values[1:]),
        pairs.components,
        pairs.properties,
    )
    other = System(system.types, system.positions, system.cell, system.pbc)
    other.add_neighbor_list(options, half)
    with pytest.raises(RuntimeError, match="every pair of atoms in both directions.*for 1 of"):
        evaluate(model, [other])


def with_adapters(model):
    from metatrain.pet.modules.finetuning import apply_finetuning_strategy

    config = {"method": "lora", "config": {"rank": 2, "alpha": 1.0}, "inherit_heads": {}}
    return apply_finetuning_strategy(model, config)


def with_long_range(model):
    model.long_range = True
    return model


def with_unknown_cutoffs(model):
    model.backend.adaptive_cutoff_method = "guess"
    return model


def with_wide_heads(model):
    return pet_model(d_pet=144, num_heads=1)


@pytest.mark.parametrize(
    "change, reason",
    [
        (with_wide_heads, "attention heads have 144 columns"),
        (with_adapters, "a module LoRALinear, which the backend does not know"),
        (with_long_range, "long-range features"),
        (with_unknown_cutoffs, "the method of adaptive cutoffs 'guess'"),
        (torch.nn.Sequential, "is a Sequential, not PET"),
    ],
)
def test_models_that_keep_the_stock_backend(change, reason):
    model = change(pet_model())
    before = model.state_dict()
    assert reason in replace_backend(model)
    assert model.state_dict().keys() == before.keys()


def test_other_versions_of_metatrain_keep_the_stock_backend(monkeypatch):
    monkeypatch.setattr(replace, "METATRAIN_VERSIONS", ["2031.1"])
    model = pet_model()
    assert "is made for 2031.1" in replace_backend(model)
    assert backend_of(model) == "stock"
