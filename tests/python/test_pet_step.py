"""PetStep gives what the whole model gives, also in arrays with room to spare."""

import json
from pathlib import Path

import ase
import metatomic_tc
import pytest
import torch
import vesin.metatomic
from metatomic.torch import (
    NeighborListOptions,
    System,
    load_atomistic_model,
    systems_to_torch,
)
from metatomic_tc.pet import Step, backend_of, replace_backend
from test_pet_backend import CASES, SETTINGS, evaluate, pet_model, systems_of

pytestmark = pytest.mark.filterwarnings("ignore")

DATA = Path(__file__).parent.parent / "data"
#: so that arrays have room to spare on the CPU, too
SPARE = 0.005
#: without ZBL and charges
STEP_CASES = [case for case in CASES if not case[7] and not case[8]]
STEP_CASES += [
    ("PreLN", "RMSNorm", "SiLU", "residual", 1, "grid", "Cosine", False, False, 32, True)
]


def trained_model(**settings):
    """A model with an energy and a factor for each species, as training finds them."""
    pet = pet_model(**settings)
    weights = pet.additive_models[0].model.weights["energy"].block().values
    weights += torch.arange(1.0, 1.0 + weights.numel()).reshape(weights.shape)
    scales = pet.scaler.model.scales["energy"].block().values
    scales *= 1.0 + 0.3 * torch.arange(1.0, 1.0 + scales.numel()).reshape(scales.shape)
    assert replace_backend(pet) is None
    return pet.export()


def moved(system, positions, cell=None):
    """The system with other positions, and with the pairs that it then has."""
    other = System(system.types, positions, system.cell if cell is None else cell, system.pbc)
    for options in system.known_neighbor_lists():
        pairs = vesin.metatomic.NeighborList(options, "angstrom").compute(other)
        other.add_neighbor_list(options, pairs)
    return other


def pairs_of(system, cutoff=4.0):
    """``[P, 5]``, each pair once."""
    options = NeighborListOptions(cutoff, full_list=False, strict=True)
    list_of = vesin.metatomic.NeighborList(options, "angstrom")
    return list_of.compute(system.to(dtype=torch.float64, device="cpu")).samples.values


def expected_of(model, system):
    """Energies of atoms, forces and virial by the whole model."""
    result = evaluate(model, [system], [], ["energy"])
    return result["energy"][:, 0], result["forces"], result["virials"][0]


def assert_same(found, expected, tolerance=1e-10):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.cpu().double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("spare, lean", [(-1.0, False), (0.02, False), (0.02, True)])
@pytest.mark.parametrize("case", STEP_CASES, ids=lambda case: "-".join(map(str, case)))
def test_same_as_the_whole_model(case, spare, lean, device):
    model = trained_model(**dict(zip(SETTINGS, case, strict=True)))
    step = Step(model, device=device, spare=spare, lean=lean)
    for name in ["slab", "water", "one atom", "crystal", "no pairs", "molecule"]:
        (system,) = systems_of([name], model)
        step.set_structure(system.types, pairs_of(system))
        # with a graph the first step runs without it, and the second one captures it
        for repeat in range(2 if spare < 0 else 4):
            positions = (1.0 + 0.002 * repeat) * system.positions
            found = step(positions, system.cell)
            assert_same(found, expected_of(model, moved(system, positions)))
    graphs = device.type == "cuda" and spare >= 0
    assert (step.graph_problem == "") == graphs
    assert (step.captures > 0) == graphs


def test_more_edges_than_there_is_room_for(device):
    model = trained_model(adaptive=None)
    (close,) = systems_of(["water"], model)
    wide = moved(close, 1.6 * close.positions, 1.6 * close.cell)
    step = Step(model, device=device, spare=SPARE)
    step.set_structure(close.types, pairs_of(close, 7.0))
    for system in [wide, wide, close, close, wide, close]:
        assert_same(step(system.positions, system.cell), expected_of(model, system))
    assert step.captures == (2 if device.type == "cuda" else 0)


def test_a_much_smaller_structure(device):
    model = trained_model()
    step = Step(model, device=device, spare=SPARE)
    for name in ["water", "one atom", "slab", "no pairs"]:
        (system,) = systems_of([name], model)
        step.set_structure(system.types, pairs_of(system, 9.0 if name == "slab" else 4.0))
        for _ in range(3):
            assert_same(step(system.positions, system.cell), expected_of(model, system))


def test_repeats_are_bit_identical(device):
    model = metatomic_tc.convert(trained_model(dtype=torch.float32), "tf32x3")
    (system,) = systems_of(["water"], model, torch.float32)
    step = Step(model, device=device, spare=SPARE)
    step.set_structure(system.types, pairs_of(system))
    step(system.positions, system.cell)
    first = step(system.positions, system.cell)
    step(1.01 * system.positions, system.cell)
    for one, other in zip(step(system.positions, system.cell), first, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("mode", ["tf32x3", "bf16x6", "fp16x3", "bf16x9"])
def test_weights_are_packed_once(mode, lean):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels that pack weights are for compute capability 9.0")
    model = metatomic_tc.convert(trained_model(dtype=torch.float32), mode)
    (system,) = systems_of(["water"], model, torch.float32)
    step = Step(model, device="cuda", lean=lean)
    step.set_structure(system.types, pairs_of(system))
    for _ in range(3):
        expected = step(system.positions, system.cell)
    assert step.captures == 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        found = step(system.positions, system.cell)
        torch.cuda.synchronize()
    kernels = [event.name for event in profiler.events()]
    assert any("multiply_kernel" in name for name in kernels)
    assert not any("pack_kernel" in name for name in kernels)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("featurizer", ["feedforward", "residual"])
def test_uncertainties(featurizer, device):
    from metatrain.llpr import LLPRUncertaintyModel

    pet = pet_model(featurizer_type=featurizer)
    llpr = LLPRUncertaintyModel({"num_ensemble_members": {}}, pet.dataset_info)
    llpr.set_wrapped_model(pet)
    llpr.to(torch.float64).eval()
    for name, buffer in llpr.named_buffers():
        if name.startswith("cholesky_"):
            noise = torch.linspace(0.0, 0.2, buffer.numel(), dtype=torch.float64)
            buffer.copy_((torch.eye(len(buffer)) + noise.reshape(buffer.shape)).tril())
        if name.startswith("multiplier_"):
            buffer.fill_(1.7)
    assert replace_backend(llpr) is None
    model = llpr.export()
    (system,) = systems_of(["slab"], model)
    outputs = ["energy", "energy_uncertainty"]
    found = evaluate(model, [system], [], outputs)
    expected = [found[name][:5, 0] for name in outputs]
    for lean in (False, True):
        step = Step(model, device=device, spare=SPARE, lean=lean, uncertainty=True)
        step.set_structure(system.types, pairs_of(system), owned=5)
        for _ in range(3):
            energies, _, _ = step(system.positions, system.cell)
        assert_same([energies, step.uncertainties], expected)
    assert step.uncertainties.min() > 1e-3
    with pytest.raises(ValueError, match="uncertainty of the output energy is not known"):
        Step(trained_model(), device="cpu", uncertainty=True)


@pytest.mark.parametrize("full", [True, False])
def test_metatomic_systems(full, device):
    model = trained_model()
    step = Step(model, device=device, spare=SPARE)
    for name in ["crystal", "slab", "no pairs"]:
        (system,) = systems_of([name], model)
        expected = expected_of(model, system)
        other = System(system.types, system.positions, system.cell, system.pbc)
        with pytest.raises(ValueError, match="must have one neighbor list, but it has 0"):
            step.set_system(other)
        options = NeighborListOptions(4.0, full_list=full, strict=True)
        pairs = vesin.metatomic.NeighborList(options, "angstrom").compute(other)
        other.add_neighbor_list(options, pairs)
        step.set_system(other.to(device=device))
        assert_same(step(system.positions, system.cell), expected)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_positions_that_are_no_numbers_give_none(wrong, device):
    model = trained_model()
    (system,) = systems_of(["water"], model)
    step = Step(model, device=device, spare=SPARE)
    step.set_structure(system.types, pairs_of(system))
    positions = system.positions.clone()
    positions[3, 1] = wrong
    for _ in range(3):
        assert step(positions, system.cell)[0].isnan().all()
        assert step(system.positions, system.cell)[0].isfinite().all()


def test_owned_atoms(device):
    model = trained_model()
    (system,) = systems_of(["slab"], model)
    step = Step(model, device=device, spare=SPARE)
    step.set_structure(system.types, pairs_of(system), owned=3)

    def energy(x):
        positions = system.positions.clone()
        positions[5, 1] += x
        return step(positions, system.cell)[0].sum().item()

    energies, forces, _ = step(system.positions, system.cell)
    assert len(energies) == 3 and len(forces) == len(system)
    slope = (energy(1e-4) - energy(-1e-4)) / 2e-4
    assert abs(slope) > 1e-3 and forces[5, 1].item() == pytest.approx(-slope, abs=1e-6)


@pytest.mark.parametrize("mode", ["fp32", "tf32x3", "tf32"])
def test_modes(mode, device):
    model = trained_model(dtype=torch.float32)
    (system,) = systems_of(["water"], model, torch.float32)
    expected = expected_of(model, system)[1]
    step = Step(metatomic_tc.convert(model, mode), device=device, spare=SPARE)
    step.set_structure(system.types, pairs_of(system))
    for _ in range(2):
        error = (step(system.positions, system.cell)[1] - expected).norm() / expected.norm()
    assert error > 1e-5 if mode == "tf32" else error < 2e-6


# ---- what it does not do -------------------------------------------------------------------------


def test_other_models_are_refused():
    stock = pet_model().export()
    with pytest.raises(ValueError, match="no PET with the backend of metatomic-tc"):
        Step(stock, device="cpu")
    with pytest.raises(ValueError, match="output free_energy of the model is no energy"):
        Step(trained_model(), "free_energy", "cpu")
    pet = pet_model(zbl=True)
    assert replace_backend(pet) is None
    with pytest.raises(ValueError, match="repulsion"):
        Step(pet.export(), device="cpu")


def test_wrong_arguments():
    model = trained_model()
    (system,) = systems_of(["water"], model)
    step = Step(model, device="cpu")
    with pytest.raises(ValueError, match="needs a structure first"):
        step(system.positions, system.cell)
    with pytest.raises(ValueError, match=r"pairs \[pairs, 5\]"):
        step.set_structure(system.types, pairs_of(system)[:, :4])
    with pytest.raises(ValueError, match="owned"):
        step.set_structure(system.types, pairs_of(system), len(system) + 1)
    with pytest.raises(ValueError, match="does not know the atomic type 79; take a model"):
        step.set_structure(torch.full_like(system.types, 79), pairs_of(system))
    with pytest.raises(ValueError, match="does not know the atomic type -1"):
        step.set_structure(torch.full_like(system.types, -1), pairs_of(system))
    with pytest.raises(ValueError, match="needs a structure first"):
        step(system.positions, system.cell)
    with pytest.raises(
        ValueError, match="24 atoms, numbered from 0, but found the indices 0 to 500"
    ):
        step.set_structure(system.types, torch.tensor([[0, 1, 0, 0, 0], [1, 500, 0, 0, 0]]))
    with pytest.raises(ValueError, match="pairs as integers"):
        step.set_structure(system.types, pairs_of(system).double())
    step.set_structure(system.types, pairs_of(system))
    with pytest.raises(ValueError, match=r"positions \[24, 3\]"):
        step(system.positions[1:], system.cell)


# ---- exported files, whose TorchScript is frozen ------------------------------------------------


@pytest.fixture(scope="module")
def old_file():
    """
    A tiny PET in FP64, exported before the backend had the attribute ``interface``, and what
    metatrain's own backend computed for it: a structure, and energies, forces and virial.
    """
    expected = json.loads((DATA / "pet-interface-0.json").read_text())
    structure = [expected.pop(name) for name in ("symbols", "positions", "cell", "pbc")]
    atoms = ase.Atoms(structure[0], structure[1], cell=structure[2], pbc=structure[3])
    expected = {name: torch.tensor(x, dtype=torch.float64) for name, x in expected.items()}
    return DATA / "pet-interface-0.pt", atoms, list(expected.values())


def system_of(atoms, model):
    (system,) = systems_to_torch([atoms], dtype=torch.float64)
    vesin.metatomic.compute_requested_neighbors(system, "angstrom", model)
    return system


@pytest.mark.parametrize("lean", [False, True])
def test_files_from_before_interfaces_had_numbers(old_file, lean, device):
    path, atoms, expected = old_file
    model = load_atomistic_model(path)
    assert backend_of(model) == "tc"
    assert not any(hasattr(module, "interface") for module in model.modules())
    system = system_of(atoms, model)
    step = Step(model, device=device, spare=SPARE, lean=lean)
    step.set_system(system)
    for _ in range(3):
        assert_same(step(system.positions, system.cell), expected)
    assert_same(expected_of(model, system), expected)


def test_what_is_exported_now_has_a_number():
    model = trained_model()
    assert model.module.backend.interface == 1
    assert torch.jit.script(model).module.backend.interface == 1


@pytest.mark.parametrize("interface", [2, 7, -1])
def test_interfaces_that_are_not_known(interface):
    model = trained_model()
    (system,) = systems_of(["slab"], model)
    model = torch.jit.script(model)
    step = Step(model, device="cpu")
    step.set_system(system)
    expected = step(system.positions, system.cell)
    model.module.backend.interface = interface
    assert backend_of(model) == "tc"
    with pytest.raises(ValueError) as error:
        Step(model, device="cpu")
    assert (
        f"the PET backend in the model has the interface {interface}, but this metatomic-tc drives "
        "the interfaces 0 to 1; export the model again from its checkpoint, with metatomic-tc "
        "export"
    ) in str(error.value)
    assert_same(expected_of(model, system), expected)
