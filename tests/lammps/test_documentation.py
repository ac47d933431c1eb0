"""Every example of the documentation runs, and every test that it names exists."""

import re
from pathlib import Path

import ase
import pytest
import structures
from lammps_runs import execute, write_data
from metatomic_tc.export import export

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "pair_metatomic-tc.md").read_text()


def examples():
    """The examples of the page: parts of the blocks after its heading "Examples" that start with
    `pair_style`."""
    blocks = re.findall(r"^```\n(.*?)^```", PAGE[PAGE.index("## Examples") :], re.DOTALL | re.M)
    parts = [part.strip() for block in blocks for part in block.split("\n\n")]
    assert parts and all(part.startswith(("pair_style", "units")) for part in parts), parts
    return parts


@pytest.fixture(scope="module")
def models(made_once, tiny_llpr_checkpoint, tiny_pet):
    """Models that can do what those of the examples can."""
    path = made_once("llpr.pt", lambda path: export(tiny_llpr_checkpoint, path))
    return {"pet-mad-s.pt": path, "water.pt": tiny_pet}


@pytest.mark.parametrize("example", examples())
def test_examples_of_the_page(example, models, pair_model, tmp_path):
    coefficients = re.search(r"^pair_coeff +\* \* (?:metatomic-tc )?(\S+\.pt) (.*)", example, re.M)
    elements = coefficients[2].split()
    known = [element for element in elements if element != "NULL"]
    name = coefficients[1]
    if name in models:
        model = models[name]
    else:
        kinds = [ase.Atoms(element).numbers[0] for element in known]
        model = pair_model(kinds=kinds, extras=True)
    (tmp_path / name).symlink_to(model)

    atoms = structures.water()
    types = [i % len(elements) + 1 for i in range(len(atoms))]
    write_data(tmp_path / "structure.data", atoms, elements, types)
    head = "" if example.startswith("units") else "units metal\natom_style atomic\n"
    head += "" if "read_data" in example else "read_data structure.data\nneighbor 1.0 bin\n"
    code, log = execute(f"{head}{re.sub('cuda:1', 'cpu', example)}\nrun 1\n", tmp_path)
    assert code == 0 and "ERROR" not in log, log
    assert "Loop time of" in log


def test_there_are_as_many_examples_as_models():
    assert len(examples()) == PAGE[PAGE.index("## Examples") :].count("\npair_style ")


def test_every_keyword_is_described():
    source = (ROOT / "lammps-plugin" / "keywords.cpp").read_text()
    table = source[source.index("keywords[] = {") :].split(";", 1)[0]
    keywords = re.findall(r'"([^"]+)"', table)
    assert len(keywords) > 10
    for keyword in keywords:
        assert keyword in PAGE or keyword.startswith("variant/")
        assert keyword.startswith("variant/") or f"**{keyword}**" in PAGE, keyword


@pytest.mark.parametrize("page", ["complaints.md"])
def test_tests_that_are_named_exist(page):
    text = (ROOT / "docs" / page).read_text()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 30
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for file, test in named:
        assert f"def {test}(" in files[file], f"{file}::{test}"
