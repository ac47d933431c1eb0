"""Models and structures that tests of several parts share."""

import fcntl
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

# The matrices of the tests are small: more threads wait longer than they compute, above all where
# other programs run too. This is for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

# `test_the_number_of_threads_does_not_matter` uses several.
torch.set_num_threads(1)

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests begin first: at the end one process would wait for the other's."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """
    `made_once(name, make)` is a file or directory of this name, which `make` wrote to the path
    that it got, once for all processes of pytest-xdist. Tests read it only.
    """
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent  # what is above the directories of the workers
    directory = directory / "made-once"
    (directory / "unfinished").mkdir(parents=True, exist_ok=True)

    def find_or_make(name: str, make: Callable[[Path], None]) -> Path:
        path = directory / name
        with (directory / "unfinished" / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                make(directory / "unfinished" / name)
                (directory / "unfinished" / name).rename(path)
        return path

    return find_or_make


@pytest.fixture(scope="session")
def stock_models(
    demo_checkpoint, tiny_pet_checkpoint, tiny_two_heads_checkpoint, made_once
) -> Path:
    """A directory of models that were written in one process, since that takes long to start."""

    def make(directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        names = {
            demo_checkpoint: "demo.pt",
            tiny_pet_checkpoint: "tiny.pt",
            tiny_two_heads_checkpoint: "two-heads.pt",
        }
        stock_export({checkpoint: directory / name for checkpoint, name in names.items()})

    return made_once("stock", make)


@pytest.fixture(scope="session")
def demo_model(stock_models) -> Path:
    """The demo model as `mtt export` writes it: plain PyTorch, no metatomic-tc in it."""
    return stock_models / "demo.pt"


@pytest.fixture(scope="session")
def tiny_pet_checkpoint(made_once) -> Path:
    """A small PET with random weights and one output, energy."""
    return made_once("tiny.ckpt", lambda path: save_checkpoint(tiny_pet_model(), path))


@pytest.fixture(scope="session")
def tiny_pet(stock_models) -> Path:
    """`tiny_pet_checkpoint` as `mtt export` writes it."""
    return stock_models / "tiny.pt"


@pytest.fixture(scope="session")
def tiny_two_heads_checkpoint(made_once) -> Path:
    """A small PET with random weights and two outputs, energy and non-conservative forces."""
    return made_once(
        "two-heads.ckpt",
        lambda path: save_checkpoint(tiny_pet_model(non_conservative=True), path),
    )


@pytest.fixture(scope="session")
def tiny_two_heads(stock_models) -> Path:
    """`tiny_two_heads_checkpoint` as `mtt export` writes it."""
    return stock_models / "two-heads.pt"


@pytest.fixture(scope="session")
def tiny_llpr_checkpoint(made_once) -> Path:
    """`tiny_two_heads_checkpoint` in an LLPR model, with an ensemble of four for the energy."""

    def make(path: Path) -> None:
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
        save_checkpoint(model, path)

    return made_once("llpr.ckpt", make)


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


def save_checkpoint(model, path: Path) -> None:
    """Write a metatrain model as `mtt train` does."""
    torch.save(model.get_checkpoint(), path)


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
