"""The walls between the rooms of the code, which docs/developing.md draws."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPP = ROOT / "cpp"
DEVELOPING = ROOT / "docs" / "developing.md"
#: a room, and those that it may include, besides itself
ROOMS = {
    "product": {"include"},
    "rows": {"product"},
    "linear": {"include", "product", "rows"},
    "pet": {"include", "product", "rows", "linear"},
    "bridge": {"include", "product", "linear", "pet"},
}
#: in rows these two are for the rooms with torch
WITH_TORCH = {"rows/run.hpp", "rows/stream.hpp"}
SOURCES = {".cpp", ".hpp", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)

pytestmark = pytest.mark.skipif(
    not CPP.is_dir(), reason="the sources of the library are not here, only its package"
)


def sources(*rooms: str) -> list[Path]:
    return [
        path for room in rooms for path in sorted((CPP / room).rglob("*")) if path.suffix in SOURCES
    ]


def room_of(included: str, path: Path) -> str | None:
    """The room of an included file; None for one that is not of the library."""
    if included.startswith("metatomic_tc/"):
        return "include"
    for directory in (path.parent, CPP):
        if (directory / included).is_file():
            return (directory / included).resolve().relative_to(CPP).parts[0]
    return None


def test_every_source_is_in_a_room():
    assert {path.name for path in CPP.iterdir() if path.is_dir()} == {"include", *ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_includes_only_what_is_below_it(room):
    found = sources(room)
    assert found
    for path in found:
        for included in INCLUDE.findall(path.read_text()):
            assert room_of(included, path) in {None, room, *ROOMS[room]}, (path, included)


def test_no_torch_below_linear():
    torch = re.compile(r"torch/|ATen|c10/|caffe2/")
    kernels = [path for path in sources("linear", "pet") if "kernels" in path.parts]
    found = sources("product", "rows") + kernels
    assert len(found) > 40
    for path in found:
        if str(path.relative_to(CPP)) not in WITH_TORCH:
            for included in INCLUDE.findall(path.read_text()):
                assert not torch.match(included), (path, included)
                assert str(included) not in WITH_TORCH, (path, included)


def test_the_plugin_knows_public_headers_only():
    headers = {path.name for path in (CPP / "include" / "metatomic_tc").iterdir()}
    for path in (ROOT / "lammps-plugin").iterdir():
        if path.suffix in {".h", ".cpp"}:
            for included in INCLUDE.findall(path.read_text()):
                if included.startswith("metatomic_tc/"):
                    assert included.removeprefix("metatomic_tc/") in headers, (path, included)
                else:
                    assert room_of(included, CPP / "x") is None, (path, included)


def test_the_map_names_what_there_is():
    text = DEVELOPING.read_text()
    paths = set(re.findall(r"`([\w./-]+)`", text))
    paths = {
        path
        for path in paths
        if path != "fmt/format.h" and ("/" in path or path.endswith((".md", ".py", ".hpp", ".cpp")))
    }
    assert len(paths) > 40
    missing = sorted(path for path in paths if not (ROOT / path).exists())
    assert not missing
    for room in ROOMS:
        assert f"cpp/{room}" in text
