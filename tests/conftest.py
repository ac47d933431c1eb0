"""Models and structures that tests of several parts share."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "water"
#: H, C, O, Pt
TINY_TYPES = [1, 6, 8, 78]


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    """The trained PET-XS demo model, a metatrain checkpoint."""
    path = EXAMPLES / "pet-xs-demo.ckpt"
    assert path.is_file(), f"the demo checkpoint is missing: {path}"
    return path


@pytest.fixture(scope="session")
def stock_models(demo_checkpoint, tiny_pet_checkpoint, tmp_path_factory) -> dict[str, Path]:
    """The demo model and `tiny_pet`, written in one process since that takes long to start."""
    directory = tmp_path_factory.mktemp("stock")
    paths = {"demo": directory / "demo.pt", "tiny": directory / "tiny.pt"}
    stock_export({demo_checkpoint: paths["demo"], tiny_pet_checkpoint: paths["tiny"]})
    return paths


@pytest.fixture(scope="session")
def demo_model(stock_models) -> Path:
    """The demo model as `mtt export` writes it: plain PyTorch, no metatomic-tc in it."""
    return stock_models["demo"]


@pytest.fixture(scope="session")
def tiny_pet_checkpoint(tmp_path_factory) -> Path:
    """A small PET with random weights and one output, energy."""
    return save_checkpoint(tiny_pet_model(), tmp_path_factory.mktemp("tiny") / "tiny.ckpt")


@pytest.fixture(scope="session")
def tiny_pet(stock_models) -> Path:
    """`tiny_pet_checkpoint` as `mtt export` writes it."""
    return stock_models["tiny"]


@pytest.fixture(scope="session")
def tiny_two_heads_checkpoint(tmp_path_factory) -> Path:
    """A small PET with random weights and two outputs, energy and non-conservative forces."""
    path = tmp_path_factory.mktemp("tiny") / "two-heads.ckpt"
    return save_checkpoint(tiny_pet_model(non_conservative=True), path)


@pytest.fixture(scope="session")
def tiny_two_heads(tiny_two_heads_checkpoint, tmp_path_factory) -> Path:
    """`tiny_two_heads_checkpoint` as `mtt export` writes it."""
    path = tmp_path_factory.mktemp("stock") / "two-heads.pt"
    stock_export({tiny_two_heads_checkpoint: path})
    return path


@pytest.fixture(scope="session")
def tiny_llpr_checkpoint(tmp_path_factory) -> Path:
    """`tiny_two_heads_checkpoint` in an LLPR model, with an ensemble of four for the energy."""
    from metatrain.llpr import LLPRUncertaintyModel

    pet = tiny_pet_model(non_conservative=True)
    model = LLPRUncertaintyModel({"num_ensemble_members": {"energy": 4}}, pet.dataset_info)
    model.set_wrapped_model(pet)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.startswith("cholesky_"):
            size = buffer.shape[0]
            noise = 0.1 * torch.randn(size, size, generator=generator)
            buffer.copy_((torch.eye(size) + noise).tril())
    return save_checkpoint(model, tmp_path_factory.mktemp("tiny") / "llpr.ckpt")


@pytest.fixture(scope="session")
def water():
    """Eight water molecules in a periodic box, an ase.Atoms."""
    import ase.build

    molecule = ase.build.molecule("H2O")
    molecule.set_cell([3.1, 3.1, 3.1])
    atoms = molecule * (2, 2, 2)
    atoms.pbc = True
    atoms.rattle(0.05, seed=7)
    return atoms


def tiny_pet_model(non_conservative: bool = False, seed: int = 0):
    """A small metatrain PET with random weights."""
    from metatrain.pet import PET
    from metatrain.pet.documentation import ModelHypers
    from metatrain.utils.data import DatasetInfo
    from metatrain.utils.data.target_info import get_energy_target_info, get_generic_target_info
    from metatrain.utils.hypers import init_with_defaults

    hypers = init_with_defaults(ModelHypers)
    hypers.update(
        cutoff=4.5,
        d_pet=32,
        d_node=64,
        d_head=32,
        d_feedforward=64,
        num_heads=4,
        num_gnn_layers=2,
        num_attention_layers=1,
        num_neighbors_adaptive=8,
    )
    targets = {
        "energy": get_energy_target_info(
            "energy",
            {"quantity": "energy", "unit": "eV"},
            add_position_gradients=True,
            add_strain_gradients=True,
        )
    }
    if non_conservative:
        targets["non_conservative_forces"] = get_generic_target_info(
            "non_conservative_forces",
            {
                "quantity": "force",
                "unit": "eV/Angstrom",
                "type": {"cartesian": {"rank": 1}},
                "num_subtargets": 1,
                "sample_kind": "atom",
                "per_atom": True,
                "description": "",
            },
        )
    info = DatasetInfo(length_unit="angstrom", atomic_types=TINY_TYPES, targets=targets)
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        return PET(hypers, info).eval()


def save_checkpoint(model, path: Path) -> Path:
    """Write a metatrain model as `mtt train` does."""
    torch.save(model.get_checkpoint(), path)
    return path


def stock_export(models: dict[Path, Path]) -> None:
    """
    What `mtt export` does, in a process of its own: the libraries that are loaded here, ours among
    them, would be recorded in the files.

    :param models: checkpoints and the files to write
    """
    code = """
import sys
from metatrain.utils.io import load_model
for checkpoint, path in zip(sys.argv[1::2], sys.argv[2::2]):
    load_model(checkpoint).export().save(path)
"""
    arguments = [str(path) for pair in models.items() for path in pair]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
