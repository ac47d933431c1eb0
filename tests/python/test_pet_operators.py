"""The operators of the PET backend: values and gradients of their reference in plain PyTorch."""

import inspect
import itertools
from dataclasses import dataclass, fields, replace

import metatomic_tc  # noqa: F401, loads the operators
import pet_reference
import pytest
import torch
from torch import Tensor

# ---- neighbor lists ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Graph:
    """Edges in rows by centre, in a random order within a row."""

    positions: Tensor
    cells: Tensor
    system_indices: Tensor
    neighbors: Tensor
    cell_shifts: Tensor
    row_starts: Tensor
    reverse: Tensor
    cutoff: float

    @property
    def num_atoms(self) -> int:
        return len(self.positions)

    @property
    def num_edges(self) -> int:
        return len(self.neighbors)


def graph(systems: list[tuple[int, float]], cutoff: float, images: int, seed: int = 0) -> Graph:
    """
    :param systems: the number of atoms and the size of the (skewed) cell of each
    :param images: how many cells away neighbors may be; 0 for systems that are not periodic
    """
    generator = torch.Generator().manual_seed(seed)
    steps = torch.arange(-images, images + 1)
    shifts = torch.cartesian_prod(steps, steps, steps)
    positions, cells, indices, edges = [], [], [], []
    first = 0
    for index, (count, size) in enumerate(systems):
        cell = size * torch.eye(3, dtype=torch.float64)
        cell[1, 0] = 0.2 * size
        place = torch.rand(count, 3, generator=generator, dtype=torch.float64) @ cell
        vectors = place[None, :, None] - place[:, None, None] + shifts.double() @ cell
        distances = vectors.norm(dim=-1)
        for i, j, s in ((distances < cutoff) & (distances > 0)).nonzero().tolist():
            edges.append((first + i, first + j, *shifts[s].tolist()))
        positions.append(place)
        cells.append(cell)
        indices += count * [index]
        first += count
    edges = torch.tensor(edges).reshape(-1, 5)
    edges = edges[torch.randperm(len(edges), generator=generator)]
    edges = edges[edges[:, 0].argsort(stable=True)].int()
    counts = torch.zeros(first, dtype=torch.int32)
    counts.index_add_(0, edges[:, 0], torch.ones_like(edges[:, 0]))
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
    neighbors, cell_shifts = edges[:, 1].contiguous(), edges[:, 2:].contiguous()
    reverse = pet_reference.pet_reverse_edges(neighbors, cell_shifts, starts)
    return Graph(
        torch.cat(positions),
        torch.stack(cells),
        torch.tensor(indices, dtype=torch.int32),
        neighbors,
        cell_shifts,
        starts,
        reverse,
        cutoff,
    )


GRAPHS = {
    # several systems, one of them an atom without edges between others
    "batch": graph([(7, 4.0), (1, 30.0), (3, 3.5), (0, 5.0), (2, 3.0)], 3.5, 2),
    # 130 to 150 edges for each atom, many of them to its own images
    "dense": graph([(6, 3.0)], 5.3, 3),
    "one atom": graph([(1, 9.0)], 3.0, 0),
    "no edges": graph([(3, 90.0)], 2.0, 0),
    "no atoms": graph([(0, 5.0)], 2.0, 0),
}
#: for gradcheck
TINY = graph([(3, 3.2), (1, 20.0), (2, 3.4)], 2.9, 1, seed=1)


def test_the_graphs_are_what_their_names_say():
    counts = GRAPHS["dense"].row_starts.diff()
    assert 100 < counts.min() and counts.max() < 150
    assert (GRAPHS["batch"].row_starts.diff() == 0).any() and GRAPHS["batch"].num_edges > 50
    assert all(GRAPHS[name].num_edges == 0 for name in ("one atom", "no edges", "no atoms"))
    assert (TINY.reverse >= 0).all() and 4 < TINY.num_edges < 60, TINY.num_edges


# ---- arguments of each operator ------------------------------------------------------------------


class Draw:
    """Random float64 tensors."""

    def __init__(self, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def rows(self, *shape: int) -> Tensor:
        """Rows whose magnitudes differ by up to four orders, and by one with the sign."""
        values = self(*shape)
        values = torch.where(values > 0, 3 * values, 0.3 * values)
        return values * 10 ** (4 * torch.rand(shape[0], 1, generator=self.generator) - 2).double()

    def factors(self, count: int) -> Tensor:
        """Cutoff factors, some of them zero, one or tiny."""
        values = torch.rand(count, generator=self.generator, dtype=torch.float64)
        values[::7], values[1::7], values[2::7] = 0.0, 1.0, 1e-20
        return values


@dataclass(frozen=True)
class Case:
    """A call of an operator. Floating-point arguments are float64."""

    operator: str
    arguments: dict
    #: names of the arguments that have gradients
    gradients: list[str]


def geometry_case(operator: str, g: Graph) -> Case:
    names = list(inspect.signature(getattr(pet_reference, operator)).parameters)
    given = {field.name: getattr(g, field.name) for field in fields(g)}
    given |= {"num_neighbors": 5.0, "max_cutoff": g.cutoff, "width": 0.9}
    return Case(operator, {name: given[name] for name in names}, ["positions", "cells"])


def cutoff_case(g: Graph, bump: bool) -> Case:
    draw = Draw()
    vectors = geometry_case("pet_edge_vectors", g).arguments
    arguments = {
        "vectors": pet_reference.pet_edge_vectors(**vectors),
        "atomic_cutoffs": g.cutoff - 0.3 * torch.rand(g.num_atoms, generator=draw.generator),
        "neighbors": g.neighbors,
        "row_starts": g.row_starts,
        "reverse": g.reverse,
        "width": 1.4,
        "bump": bump,
    }
    arguments["atomic_cutoffs"] = arguments["atomic_cutoffs"].double()
    return Case("pet_cutoff_factors", arguments, ["vectors", "atomic_cutoffs"])


def edge_tokens_case(g: Graph, dim: int, messages: bool) -> Case:
    draw = Draw()
    arguments = {
        "messages": draw.rows(g.num_edges, dim) if messages else None,
        "vectors": 2 * draw(g.num_edges, 3),
        "geometry_weight": draw(dim, 4),
        "neighbor_table": draw(5, dim),
        "neighbor_species": (torch.arange(g.num_edges, dtype=torch.int32) * 3) % 5,
    }
    return Case("pet_edge_tokens", arguments, (["messages"] if messages else []) + ["vectors"])


def norm_case(operator: str, g: Graph, dim: int, layer_norm: bool) -> Case:
    draw = Draw()
    tensors = {
        "pet_norm": {"x": g.num_edges},
        "pet_concatenated_norm": {"nodes": g.num_atoms, "edges": g.num_edges},
        "pet_residual_norm": {"tokens": g.num_atoms + g.num_edges, "edges": g.num_edges},
    }[operator]
    arguments = {name: draw.rows(count, dim) for name, count in tensors.items()}
    arguments |= {
        "weight": draw(dim),
        "bias": draw(dim) if layer_norm else None,
        "epsilon": 1e-5 if layer_norm else 2.0**-23,
        "layer_norm": layer_norm,
    }
    return Case(operator, arguments, list(tensors))


def reversed_pair_norm_case(g: Graph, dim: int) -> Case:
    draw = Draw()
    arguments = {
        "x": draw.rows(g.num_edges, dim),
        "reverse": g.reverse,
        "weight": draw(2 * dim),
        "bias": draw(2 * dim),
        "epsilon": 1e-5,
    }
    return Case("pet_reversed_pair_norm", arguments, ["x"])


def attention_case(g: Graph, num_heads: int, head_dim: int) -> Case:
    draw = Draw()
    dim = num_heads * head_dim
    arguments = {
        "qkv": draw(g.num_atoms + g.num_edges, 3 * dim),
        "cutoff_factors": draw.factors(g.num_edges),
        "row_starts": g.row_starts,
        "num_heads": num_heads,
        "scale": 0.8 / head_dim**0.5,
    }
    # values of all magnitudes, and queries and keys that prefer some tokens to others
    arguments["qkv"][:, : 2 * dim] *= 1.5
    arguments["qkv"][:, 2 * dim :] = draw.rows(g.num_atoms + g.num_edges, dim)
    return Case("pet_attention", arguments, ["qkv", "cutoff_factors"])


def segment_sum_case(g: Graph, dim: int) -> Case:
    draw = Draw()
    arguments = {
        "values": draw.rows(g.num_edges, dim),
        "factors": draw.factors(g.num_edges),
        "row_starts": g.row_starts,
    }
    return Case("pet_segment_sum", arguments, ["values", "factors"])


def average_case(g: Graph, dim: int) -> Case:
    draw = Draw()
    arguments = {"x": draw.rows(g.num_edges, dim), "y": draw.rows(g.num_edges, dim)}
    return Case("pet_average_reversed", arguments | {"reverse": g.reverse}, ["x", "y"])


def sum_case(g: Graph, dim: int) -> Case:
    draw = Draw()
    arguments = {name: draw.rows(g.num_edges, dim) for name in "xyz"}
    return Case("pet_sum", arguments, ["x", "y", "z"])


HEADS = [(1, 4), (2, 4), (3, 8), (1, 128), (2, 128), (4, 16), (5, 12), (8, 4), (8, 32)]


def cases_of(g: Graph, dims: list[int], heads: list[tuple[int, int]]) -> dict[str, Case]:
    """Cases of all operators with gradients, by name."""
    cases = {
        "adaptive_cutoffs": geometry_case("pet_adaptive_cutoffs", g),
        "edge_vectors": geometry_case("pet_edge_vectors", g),
        "cutoff_factors bump": cutoff_case(g, True),
        "cutoff_factors cosine": cutoff_case(g, False),
    }
    for dim in dims:
        cases[f"edge_tokens {dim}"] = edge_tokens_case(g, dim, True)
        cases[f"edge_tokens {dim} first"] = edge_tokens_case(g, dim, False)
        for operator, layer_norm in itertools.product(
            ["pet_norm", "pet_concatenated_norm", "pet_residual_norm"], [False, True]
        ):
            kind = "layer" if layer_norm else "rms"
            cases[f"{operator[4:]} {dim} {kind}"] = norm_case(operator, g, dim, layer_norm)
        cases[f"reversed_pair_norm {dim}"] = reversed_pair_norm_case(g, dim)
        cases[f"segment_sum {dim}"] = segment_sum_case(g, dim)
        cases[f"average_reversed {dim}"] = average_case(g, dim)
        cases[f"sum {dim}"] = sum_case(g, dim)
    for num_heads, head_dim in heads:
        name = f"attention {num_heads} x {head_dim}"
        cases[name] = attention_case(g, num_heads, head_dim)
    return cases


ALL_CASES = {
    f"{kind}: {name}": case
    for kind, g in GRAPHS.items()
    for name, case in cases_of(
        g,
        [8, 24, 256] if kind in ("batch", "dense") else [24],
        HEADS if kind in ("batch", "dense") else [(3, 8)],
    ).items()
}
#: one case of each operator
FEW = {
    name: ALL_CASES[f"batch: {name}"]
    for name in (
        "adaptive_cutoffs",
        "edge_vectors",
        "cutoff_factors bump",
        "cutoff_factors cosine",
        "edge_tokens 24",
        "edge_tokens 24 first",
        "norm 24 rms",
        "norm 24 layer",
        "concatenated_norm 24 rms",
        "residual_norm 24 layer",
        "reversed_pair_norm 24",
        "segment_sum 24",
        "average_reversed 24",
        "sum 24",
        "attention 3 x 8",
    )
}


# ---- calls ---------------------------------------------------------------------------------------


def prepared(case: Case, dtype: torch.dtype, device="cpu", gradients=None) -> dict:
    """New arguments, of which those named want a gradient."""
    arguments = {}
    for name, value in case.arguments.items():
        if isinstance(value, Tensor):
            value = value.to(device=device, dtype=dtype if value.is_floating_point() else None)
            value = value.clone()
            if name in (case.gradients if gradients is None else gradients):
                value.requires_grad_(True)
        arguments[name] = value
    return arguments


def operator(case: Case):
    return getattr(torch.ops.metatomic_tc, case.operator)


def reference(case: Case):
    return getattr(pet_reference, case.operator)


def as_tuple(result) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def call(function, case: Case, dtype: torch.dtype, device="cpu") -> dict[str, Tensor]:
    """The results, and the gradients for random gradients of all results, on the CPU."""
    arguments = prepared(case, dtype, device)
    results = as_tuple(function(**arguments))
    draw = Draw(1)
    seeds = [draw(*result.shape).to(device=device, dtype=dtype) for result in results]
    inputs = [arguments[name] for name in case.gradients]
    gradients = torch.autograd.grad(results, inputs, seeds, materialize_grads=True)
    found = {f"result {i}": result.detach() for i, result in enumerate(results)}
    found |= {f"gradient of {n}": g for n, g in zip(case.gradients, gradients, strict=True)}
    return {name: value.cpu() for name, value in found.items()}


def error(found: Tensor, exact: Tensor) -> float:
    """Largest error relative to the largest value of the row, or 1e-3 of that of the tensor."""
    if exact.numel() == 0:
        return 0.0
    rows = exact.abs().reshape(len(exact), -1)
    scale = torch.maximum(rows.max(1).values, 1e-3 * rows.max()) + 1e-300
    differences = (found.double() - exact).abs().reshape(len(exact), -1)
    return (differences / scale[:, None]).max().item()


# ---- values and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_CASES)
def test_float64_is_the_reference(name, device):
    case = ALL_CASES[name]
    expected = call(reference(case), case, torch.float64)
    found = call(operator(case), case, torch.float64, device)
    for part, value in expected.items():
        assert found[part].dtype == torch.float64 and found[part].shape == value.shape, part
        # the cutoffs are roots, found to about this
        limit = 1e-9 if case.operator == "pet_adaptive_cutoffs" else 1e-11
        assert error(found[part], value) <= limit, part


@pytest.mark.parametrize("name", ALL_CASES)
def test_float32_is_as_accurate_as_plain_pytorch(name, device):
    case = ALL_CASES[name]
    exact = call(reference(case), case, torch.float64)
    plain = call(reference(case), case, torch.float32)
    found = call(operator(case), case, torch.float32, device)
    for part, value in exact.items():
        assert found[part].dtype == torch.float32, part
        assert error(found[part], value) <= 4 * error(plain[part], value) + 4e-6, part


@pytest.mark.parametrize("name", cases_of(TINY, [8], [(2, 4)]))
def test_gradients_are_those_of_finite_differences(name, device):
    case = cases_of(TINY, [8], [(2, 4)])[name]
    if case.operator == "pet_attention":
        # below 1e-15 there is no gradient, and nothing to see with finite steps
        factors = 0.2 + 0.7 * torch.rand(TINY.num_edges, dtype=torch.float64)
        case = replace(case, arguments=case.arguments | {"cutoff_factors": factors})
    arguments = prepared(case, torch.float64, device)

    def function(*inputs):
        return operator(case)(**arguments | dict(zip(case.gradients, inputs, strict=True)))

    assert torch.autograd.gradcheck(
        function, [arguments[name] for name in case.gradients], eps=1e-6, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("name", FEW)
def test_any_of_the_inputs_may_want_a_gradient(name, device):
    case = FEW[name]
    expected = call(operator(case), case, torch.float64, device)
    for wanted in case.gradients:
        arguments = prepared(case, torch.float64, device, [wanted])
        results = as_tuple(operator(case)(**arguments))
        draw = Draw(1)
        loss = sum((draw(*result.shape).to(device) * result).sum() for result in results)
        (gradient,) = torch.autograd.grad(loss, arguments[wanted])
        assert torch.equal(gradient.cpu(), expected[f"gradient of {wanted}"])
    arguments = prepared(case, torch.float64, device, [])
    for i, result in enumerate(as_tuple(operator(case)(**arguments))):
        assert not result.requires_grad
        assert torch.equal(result.cpu(), expected[f"result {i}"])


@pytest.mark.parametrize(
    ("name", "used"),
    [("residual_norm 24 layer", used) for used in ([0], [1], [2], [0, 1], [0, 2], [1, 2])]
    + [(n, [i]) for n in ("concatenated_norm 24 rms", "reversed_pair_norm 24") for i in (0, 1)],
)
def test_any_of_the_results_may_be_used(name, used, device):
    case = FEW[name]
    gradients = []
    for function, where in ((operator(case), device), (reference(case), "cpu")):
        arguments = prepared(case, torch.float64, where)
        results = function(**arguments)
        draw = Draw(1)
        loss = sum((draw(*results[i].shape).to(where) * results[i]).sum() for i in used)
        inputs = [arguments[name] for name in case.gradients]
        gradients.append(torch.autograd.grad(loss, inputs, materialize_grads=True))
    for found, expected in zip(*gradients, strict=True):
        assert error(found.cpu(), expected) <= 1e-11


@pytest.mark.parametrize("name", FEW)
def test_strided_inputs_and_expanded_gradients(name, device):
    case = FEW[name]
    arguments = prepared(case, torch.float64, device)
    expected = as_tuple(operator(case)(**arguments))
    inputs = [arguments[name] for name in case.gradients]
    ones = [torch.ones_like(result) for result in expected]
    expected_gradients = torch.autograd.grad(expected, inputs, ones)

    strided = prepared(case, torch.float64, device)
    for name in case.gradients:
        # every second element of a larger tensor
        larger = torch.stack([strided[name].detach(), torch.ones_like(strided[name])], dim=-1)
        strided[name] = larger[..., 0].requires_grad_(True)
        assert not strided[name].is_contiguous()
    results = as_tuple(operator(case)(**strided))
    total = sum(result.sum() for result in results)
    gradients = torch.autograd.grad(total, [strided[name] for name in case.gradients])
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(gradients, expected_gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name",
    [
        "adaptive_cutoffs",
        "edge_vectors",
        "cutoff_factors bump",
        "edge_tokens 256",
        "concatenated_norm 256 rms",
        "residual_norm 256 rms",
        "reversed_pair_norm 256",
        "segment_sum 256",
        "average_reversed 256",
        "sum 256",
        "attention 8 x 32",
    ],
)
def test_results_are_the_same_bit_by_bit_every_time(name, dtype, device):
    case = ALL_CASES[f"dense: {name}"]
    first = call(operator(case), case, dtype, device)
    for _ in range(5):
        again = call(operator(case), case, dtype, device)
        assert all(torch.equal(again[part], value) for part, value in first.items())


def test_a_norm_of_pairs_without_reverses(device):
    """Where edges are not each other's reverse, each of them still gets its own row."""
    case = FEW["reversed_pair_norm 24"]
    edges = len(case.arguments["reverse"])
    others = (torch.arange(edges, dtype=torch.int32) * 5 + 2) % edges
    case = replace(case, arguments=case.arguments | {"reverse": others})
    arguments = [prepared(case, torch.float64, where) for where in (device, "cpu")]
    found, _ = operator(case)(**arguments[0])
    expected, _ = reference(case)(**arguments[1])
    assert error(found.detach().cpu(), expected.detach()) <= 1e-11


def test_a_weight_anywhere_in_memory(device):
    case = FEW["edge_tokens 24"]
    expected = call(operator(case), case, torch.float32, device)
    weight = case.arguments["geometry_weight"]

    def moved(geometry_weight, **others):
        larger = torch.zeros(weight.numel() + 1, dtype=torch.float32, device=device)
        larger[1:] = geometry_weight.flatten()
        return operator(case)(geometry_weight=larger[1:].reshape(weight.shape), **others)

    found = call(moved, case, torch.float32, device)
    assert all(torch.equal(found[part], value) for part, value in expected.items())


@pytest.mark.parametrize(
    ("name", "argument", "position", "value"),
    [
        ("attention 3 x 8", "row_starts", 0, 1),
        ("attention 3 x 8", "row_starts", 1, 2**31 - 1),
        ("attention 3 x 8", "row_starts", 2, -3),
        ("attention 3 x 8", "row_starts", -1, 1000),
        ("segment_sum 24", "row_starts", -1, 1000),
        ("reversed_pair_norm 24", "reverse", 3, -1),
        ("reversed_pair_norm 24", "reverse", 0, 2**31 - 1),
        ("average_reversed 24", "reverse", -1, -(2**31)),
        ("edge_tokens 24", "neighbor_species", 2, 5),
        ("edge_vectors", "neighbors", 1, 1000),
        ("edge_vectors", "system_indices", 0, 7),
        ("cutoff_factors bump", "reverse", 0, 1000),
        ("adaptive_cutoffs", "row_starts", 1, -1),
    ],
)
def test_indices_out_of_range_are_refused_on_the_cpu(name, argument, position, value):
    case = FEW[name]
    arguments = prepared(case, torch.float64, "cpu")
    arguments[argument] = arguments[argument].clone()
    arguments[argument][position] = value
    with pytest.raises(ValueError, match=f"'{argument}' with numbers from .* but found {value}"):
        operator(case)(**arguments)


def test_reverses_of_indices_out_of_range_are_refused_on_the_cpu():
    g = GRAPHS["batch"]
    arguments = [g.neighbors, g.cell_shifts, g.row_starts]
    for position, name in [(0, "neighbors"), (2, "row_starts")]:
        wrong = [argument.clone() for argument in arguments]
        wrong[position][1] = -1
        with pytest.raises(ValueError, match=f"'{name}' with numbers from .* but found -1"):
            torch.ops.metatomic_tc.pet_reverse_edges(*wrong)


# ---- modes of attention --------------------------------------------------------------------------


@pytest.mark.parametrize("head_size", [16, 24, 32])
@pytest.mark.parametrize("mode", ["tf32", "tf32x3", "fp16x3", "bf16x6", "bf16x9"])
def test_attention_in_modes(mode, head_size, device):
    """Products by 3xTF32 on Tensor Cores, where there are any, are as accurate as FP32."""
    case = attention_case(GRAPHS["dense"], 2, head_size)

    def results(dtype, where, mode):
        arguments = prepared(case, dtype, where)
        result = torch.ops.metatomic_tc.pet_attention(**arguments, mode=mode)
        inputs = [arguments[name] for name in case.gradients]
        weights = torch.linspace(-1.0, 1.0, result.numel(), dtype=dtype, device=where)
        gradients = torch.autograd.grad(result, inputs, weights.reshape(result.shape))
        return [x.detach().cpu().double() for x in (result, *gradients)]

    exact = results(torch.float64, "cpu", "fp32")
    plain = results(torch.float32, device, "fp32")
    found = results(torch.float32, device, mode)
    again = results(torch.float32, device, mode)
    modes = ("tf32x3", "fp16x3", "bf16x6")
    tensor_cores = device.type == "cuda" and mode in modes and head_size != 24
    for one, other, two, expected in zip(found, plain, again, exact, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, other) != tensor_cores
        assert (one - expected).norm() <= 1.5 * (other - expected).norm()


# ---- selecting edges and finding their reverses --------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GRAPHS)
def test_edges_within_the_cutoffs_are_kept(name, dtype, device):
    g = GRAPHS[name]
    cutoffs = g.cutoff * (0.6 + 0.4 * torch.rand(g.num_atoms, generator=Draw().generator))
    case = geometry_case("pet_edge_vectors", g)
    arguments = prepared(case, dtype, device, [])
    arguments.pop("reverse")
    found = torch.ops.metatomic_tc.pet_select_edges(
        **arguments, atomic_cutoffs=cutoffs.to(device=device, dtype=dtype)
    )
    arguments = prepared(case, torch.float64, "cpu", [])
    arguments.pop("reverse")
    expected = pet_reference.pet_select_edges(**arguments, atomic_cutoffs=cutoffs.double())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.int32 and torch.equal(one.cpu(), other)
    if g.num_edges > 0:
        assert 0 < len(expected[0]) < g.num_edges


@pytest.mark.parametrize("spare", [-5, 0, 3])
def test_edges_with_a_capacity(spare, device):
    g = GRAPHS["batch"]
    arguments = prepared(geometry_case("pet_edge_vectors", g), torch.float64, device, [])
    arguments.pop("reverse")
    arguments["atomic_cutoffs"] = torch.full_like(arguments["positions"][:, 0], 0.8 * g.cutoff)
    exact = torch.ops.metatomic_tc.pet_select_edges(**arguments)
    edges = len(exact[0])
    found = torch.ops.metatomic_tc.pet_select_edges(**arguments, capacity=edges + spare)
    assert found[3].tolist() == exact[3].tolist() == [edges]
    assert len(found[0]) == len(found[1]) == edges + spare
    kept = min(edges, edges + spare)
    assert torch.equal(found[2], exact[2].clamp_max(kept))
    for one, other in zip(found[:2], exact[:2], strict=True):
        assert torch.equal(one[:kept], other[:kept])
        assert not one[kept:].any()


def test_spare_rows_are_zero(device):
    """In results and gradients of what works on edges by their atoms, whatever is in the input."""
    g, spare, width = GRAPHS["batch"], 3, 8
    edges = g.num_edges + spare
    starts = g.row_starts.to(device)
    draw = Draw()

    def values(*sizes):
        tensor = draw(*sizes)
        tensor[-spare:] = torch.inf
        return tensor.to(device).requires_grad_(True)

    qkv, factors = values(g.num_atoms + edges, 3 * width), values(edges)
    attended = torch.ops.metatomic_tc.pet_attention(qkv, factors, starts, 2, 0.5)
    assert not attended[-spare:].any()
    summands = values(edges, width)
    sums = torch.ops.metatomic_tc.pet_segment_sum(summands, factors, starts)
    assert sums.isfinite().all()
    for result, inputs in [(attended, (qkv,)), (sums, (summands, factors))]:
        for gradient in torch.autograd.grad(result.sum(), inputs):
            assert gradient.isfinite().all() and not gradient[-spare:].any()


def test_a_pair_at_its_cutoff_is_kept(device):
    positions = torch.tensor([[0.0, 0, 0], [0, 0, 2.0], [0, 2.25, 0]], device=device)
    cells = torch.zeros(1, 3, 3, device=device)
    neighbors = torch.tensor([1, 2, 0, 0], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 2, 3, 4], dtype=torch.int32, device=device)
    shifts = torch.zeros(4, 3, dtype=torch.int32, device=device)
    systems = torch.zeros(3, dtype=torch.int32, device=device)
    cutoffs = torch.tensor([2.5, 1.5, 1.5], device=device)
    kept, _, rows, number = torch.ops.metatomic_tc.pet_select_edges(
        positions, cells, neighbors, shifts, starts, systems, cutoffs
    )
    assert kept.tolist() == [1, 0] and number.tolist() == [2] and rows.tolist() == [0, 1, 2, 2]


@pytest.mark.parametrize("name", GRAPHS)
def test_reverses(name, device):
    g = GRAPHS[name]
    arguments = [x.to(device) for x in (g.neighbors, g.cell_shifts, g.row_starts)]
    reverse = torch.ops.metatomic_tc.pet_reverse_edges(*arguments)
    assert reverse.dtype == torch.int32 and torch.equal(reverse.cpu(), g.reverse)
    # spare rows are their own reverses
    arguments[:2] = [torch.cat([x, x[:2]]) for x in arguments[:2]]
    reverse = torch.ops.metatomic_tc.pet_reverse_edges(*arguments)
    expected = torch.cat([g.reverse, torch.arange(g.num_edges, len(reverse), dtype=torch.int32)])
    assert torch.equal(reverse.cpu(), expected)


def test_missing_reverses_are_minus_one(device):
    # 0 -> 1 in two images, one of them without a way back; 1 -> 1 with a shift, in one direction
    neighbors = torch.tensor([1, 1, 0, 1], dtype=torch.int32, device=device)
    shifts = torch.tensor([[0, 0, 1], [0, 0, 2], [0, 0, -2], [1, 0, 0]], dtype=torch.int32)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    reverse = torch.ops.metatomic_tc.pet_reverse_edges(neighbors, shifts.to(device), starts)
    assert reverse.tolist() == [-1, 2, 1, -1]


# ---- errors --------------------------------------------------------------------------------------

ERRORS = (TypeError, ValueError, RuntimeError, IndexError, NotImplementedError)


@pytest.mark.parametrize("name", FEW)
def test_wrong_dtypes_are_errors(name, device):
    case = FEW[name]
    floats = [
        key
        for key, value in case.arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    for key, value in prepared(case, torch.float32, device, []).items():
        if not isinstance(value, Tensor):
            continue
        # one alone of another dtype, or int64 for an index
        if value.is_floating_point() and len(floats) == 1:
            continue
        wrong = value.double() if value.is_floating_point() else value.long()
        with pytest.raises(ERRORS):
            operator(case)(**prepared(case, torch.float32, device, []) | {key: wrong})
    with pytest.raises(ERRORS):
        operator(case)(**prepared(case, torch.float16, device, []))


@pytest.mark.parametrize("name", FEW)
def test_wrong_shapes_are_errors(name, device):
    case = FEW[name]
    for key, value in prepared(case, torch.float32, device, []).items():
        if not isinstance(value, Tensor):
            continue
        shorter = value[..., :-1].contiguous()
        # sums have any number of columns, and rows of which the last is left out look like others
        valid = case.operator == "pet_segment_sum" and key in ("values", "row_starts")
        for wrong in [value[None]] if valid else [value[None], shorter]:
            with pytest.raises(ERRORS):
                operator(case)(**prepared(case, torch.float32, device, []) | {key: wrong})


@pytest.mark.gpu
@pytest.mark.parametrize("name", FEW)
def test_different_devices_are_errors(name):
    case = FEW[name]
    for key, value in case.arguments.items():
        if isinstance(value, Tensor):
            arguments = prepared(case, torch.float32, "cuda", [])
            with pytest.raises(ERRORS):
                operator(case)(**arguments | {key: arguments[key].cpu()})


@pytest.mark.parametrize("name", FEW)
def test_parameters_with_gradients_are_errors(name, device):
    case = FEW[name]
    for key in {"weight", "bias", "geometry_weight", "neighbor_table"} & set(case.arguments):
        if case.arguments[key] is not None:
            with pytest.raises(ERRORS):
                operator(case)(**prepared(case, torch.float32, device, [key]))


@pytest.mark.parametrize("name", FEW)
def test_second_derivatives_are_errors(name, device):
    case = FEW[name]
    arguments = prepared(case, torch.float64, device)
    results = as_tuple(operator(case)(**arguments))
    inputs = [arguments[name] for name in case.gradients]
    with pytest.raises(ERRORS):
        total = sum((result**2).sum() for result in results)
        gradients = torch.autograd.grad(total, inputs, create_graph=True)
        torch.autograd.grad(sum(gradient.sum() for gradient in gradients), inputs)


def test_silu_of_edge_tokens_far_from_zero(device):
    inf = float("inf")
    values = torch.tensor([[-inf, -3e38, -1e4, -89, -87.5, -20, 0, 20, 87.5, 89, 1e4, 3e38, inf]])
    edges, dim = values.shape
    found = torch.ops.metatomic_tc.pet_edge_tokens(
        values.to(device),
        torch.zeros(edges, 3, device=device),
        torch.zeros(dim, 4, device=device),
        torch.zeros(1, dim, device=device),
        torch.zeros(edges, dtype=torch.int32, device=device),
    )
    expected = torch.nn.functional.silu(values.double()).float()
    # exponentials below 1e-38 may be zero
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-35, equal_nan=True)
