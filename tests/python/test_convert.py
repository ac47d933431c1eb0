"""Rewriting the linear layers of TorchScript modules and metatomic models."""

import io
from collections import Counter

import metatomic_tc
import pytest
import torch
import torch.nn.functional as F
from metatomic.torch import AtomisticModel, load_atomistic_model
from metatomic_tc.model_files import used_modes
from metatomic_tc.models import convert_script_module, convert_with_report, load_script_module
from models import energy_and_forces, largest_difference

pytestmark = pytest.mark.filterwarnings("ignore")


def converted(module: torch.nn.Module, mode: str):
    """The rewritten TorchScript module, and the report."""
    scripted = module if isinstance(module, torch.jit.ScriptModule) else torch.jit.script(module)
    content, report = convert_script_module(scripted, mode)
    return load_script_module(content), report


def paths(report) -> list[str]:
    return sorted(layer.path for layer in report.layers)


# ---- any TorchScript module ----------------------------------------------------------------------


class Nested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(3)]
        )
        self.by_name = torch.nn.ModuleDict({"a": torch.nn.Linear(32, 48, bias=False)})
        self.last = torch.nn.Linear(48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(self.by_name["a"](x))


def test_nested_modules():
    module, input = Nested(), torch.randn(10, 32)
    new, report = converted(module, "tf32")
    assert paths(report) == ["blocks.0.0", "blocks.1.0", "blocks.2.0", "by_name.a", "last"]
    assert report.mode == "tf32"
    assert report.replaced == 4 and report.left == 1
    assert [layer.path for layer in report.layers if not layer.replaced] == ["last"]
    shapes = {layer.path: (layer.in_features, layer.out_features) for layer in report.layers}
    assert shapes["by_name.a"] == (32, 48) and shapes["last"] == (48, 1)

    x = input
    for block in module.blocks:
        x = torch.tanh(metatomic_tc.linear(x, block[0].weight, block[0].bias, "tf32"))
    x = metatomic_tc.linear(x, module.by_name["a"].weight, None, "tf32")
    x = F.linear(x, module.last.weight, module.last.bias)
    for _ in range(3):
        assert torch.equal(new(input), x)
    assert not torch.equal(x, module(input))


def test_fp32_is_the_unmodified_module_bit_by_bit():
    module, input = Nested(), torch.randn(10, 32)
    new, _ = converted(module, "fp32")
    for _ in range(3):
        assert torch.equal(new(input), module(input))


class Shared(torch.nn.Module):
    """One layer under two names, called from two places."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(32, 32)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_shared_modules():
    module, input = Shared(), torch.randn(10, 32)
    new, report = converted(module, "tf32x3")
    assert report.replaced >= 1 and report.left == 0
    weight, bias = module.first.weight, module.first.bias
    x = torch.tanh(metatomic_tc.linear(input, weight, bias, "tf32x3"))
    assert torch.equal(new(input), metatomic_tc.linear(x, weight, bias, "tf32x3"))


def free_function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


class Functional(torch.nn.Module):
    """Linear layers that are no modules, one of them in a free function, one in a loop."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = free_function(x, self.weight)
        for i in range(2):
            if i == 0:
                x = F.linear(x, self.weight.T)
            else:
                x = free_function(x, self.weight * 0.5)
        return x


def test_functional_calls_and_free_functions():
    module, input = Functional(), torch.randn(10, 32)
    new, report = converted(module, "tf32")
    assert report.left == 0
    # a weight that is computed has no shape before the module runs
    assert any(layer.in_features == -1 for layer in report.layers)
    x = metatomic_tc.linear(input, module.weight, None, "tf32")
    x = metatomic_tc.linear(x, module.weight.T, None, "tf32")
    x = metatomic_tc.linear(x, module.weight * 0.5, None, "tf32")
    assert torch.equal(new(input), x)
    # the function itself stays what it was
    assert torch.equal(free_function(input, module.weight), F.linear(input, module.weight))
    scripted = torch.jit.script(free_function)
    assert torch.equal(scripted(input, module.weight), F.linear(input, module.weight))


class TwoMethods(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)
        self.other = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    @torch.jit.export
    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x)


def test_every_method():
    module, input = TwoMethods(), torch.randn(10, 32)
    new, report = converted(module, "tf32")
    assert set(paths(report)) == {"layer", "other"}
    expected = metatomic_tc.linear(input, module.layer.weight, module.layer.bias, "tf32")
    assert torch.equal(new(input), expected)
    expected = metatomic_tc.linear(input, module.other.weight, module.other.bias, "tf32")
    assert torch.equal(new.extra(input), expected)


def test_a_module_without_linear_layers():
    new, report = converted(torch.nn.Tanh(), "tf32x3")
    assert report.layers == []
    input = torch.randn(5)
    assert torch.equal(new(input), torch.tanh(input))


def test_converting_twice_changes_the_mode():
    module, input = Nested(), torch.randn(10, 32)
    once, _ = converted(module, "tf32")
    twice, report = converted(once, "tf32x3")
    direct, direct_report = converted(module, "tf32x3")
    assert report == direct_report
    assert torch.equal(twice(input), direct(input))
    assert not torch.equal(twice(input), once(input))
    back, _ = converted(twice, "fp32")
    assert torch.equal(back(input), module(input))


def test_tc_linear_layers_change_their_mode_too():
    layer, input = metatomic_tc.TCLinear(32, 32, mode="tf32"), torch.randn(5, 32)
    new, report = converted(layer, "tf32x3")
    assert report.replaced == 1
    expected = metatomic_tc.linear(input, layer.weight, layer.bias, "tf32x3")
    assert torch.equal(new(input), expected)


def test_the_original_is_untouched():
    scripted, input = torch.jit.script(Nested()), torch.randn(10, 32)
    expected = scripted(input)
    code = str(scripted.inlined_graph)
    converted(scripted, "tf32")
    assert torch.equal(scripted(input), expected)
    assert str(scripted.inlined_graph) == code


def test_gradients_of_a_rewritten_module():
    module = Nested()
    new, _ = converted(module, "tf32x3")
    gradients = []
    for network in (new, module):
        for _ in range(3):  # the profiling executor optimizes after two runs
            input = torch.linspace(-1, 1, 320).reshape(10, 32).requires_grad_(True)
            (gradient,) = torch.autograd.grad(network(input).sum(), input)
        gradients.append(gradient)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert not torch.equal(*gradients)


def test_what_is_no_torchscript_file_is_an_error():
    content = torch.zeros(100, dtype=torch.uint8)
    with pytest.raises(RuntimeError):
        torch.ops.metatomic_tc.convert(content, "tf32x3")
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Tanh()), buffer)
    content = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    with pytest.raises(ValueError, match="'tf33'"):
        torch.ops.metatomic_tc.convert(content, "tf33")
    for wrong in (content.float(), content.reshape(1, -1), torch.zeros(0, dtype=torch.uint8)):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            torch.ops.metatomic_tc.convert(wrong, "tf32x3")


# ---- metatomic models ----------------------------------------------------------------------------


def test_fp32_of_pet_is_the_stock_model_bit_by_bit(tiny_pet, water):
    energy, forces = energy_and_forces(tiny_pet, water, optimize=True)
    new = metatomic_tc.load(tiny_pet, mode="fp32")
    new_energy, new_forces = energy_and_forces(new, water, optimize=True)
    assert new_energy == energy
    # sums over neighbors in the backward pass may be in any order
    assert largest_difference(new_forces, forces) <= 1e-6


def test_modes_of_the_demo_model(demo_model, water):
    """FP32 is the stock model, FP32-level modes are close to it, one-pass TF32 is not."""

    def run(mode: str):
        return energy_and_forces(metatomic_tc.load(demo_model, mode=mode), water)

    energy, forces = energy_and_forces(demo_model, water)
    fp32_energy, fp32_forces = run("fp32")
    assert fp32_energy == energy
    assert largest_difference(fp32_forces, forces) <= 2e-5
    _, tf32_forces = run("tf32")
    for mode in ("tf32x3", "fp16x3", "bf16x6", "bf16x9"):
        new_energy, new_forces = run(mode)
        assert (new_forces != forces).any()
        assert abs(new_energy - energy) <= 1e-6 * len(water)
        error = largest_difference(new_forces, forces)
        assert error <= 2e-5
        assert largest_difference(tf32_forces, forces) >= 20 * error


def test_two_models_with_different_modes_in_one_process(tiny_pet, water):
    first, second = metatomic_tc.load(tiny_pet, "fp32"), metatomic_tc.load(tiny_pet, "tf32")
    energies = [energy_and_forces(model, water)[0] for model in (first, second, first, second)]
    assert energies[:2] == energies[2:]
    assert energies[0] != energies[1]
    assert energies[0] == energy_and_forces(tiny_pet, water)[0]


def test_convert_leaves_the_model_alone(tiny_pet, water):
    stock = load_atomistic_model(tiny_pet)
    energy, _ = energy_and_forces(stock, water)
    new = metatomic_tc.convert(stock, mode="tf32")
    assert isinstance(new, AtomisticModel)
    assert energy_and_forces(new, water)[0] != energy
    assert energy_and_forces(stock, water)[0] == energy


def test_convert_accepts_every_form_of_a_model(tiny_pet, tiny_pet_checkpoint, water):
    from metatrain.utils.io import load_model

    loaded = load_atomistic_model(tiny_pet)
    forms = [loaded, torch.jit.script(loaded), load_model(tiny_pet_checkpoint).export()]
    results = [convert_with_report(model, "tf32") for model in forms]
    for _, report in results:
        assert paths(report) == paths(results[0][1])
        assert (report.replaced, report.left) == (28, 4)
    energies = {energy_and_forces(model, water)[0] for model, _ in results}
    assert len(energies) == 1


def test_convert_keeps_what_the_model_says_of_itself(tiny_pet):
    stock = load_atomistic_model(tiny_pet)
    new = metatomic_tc.convert(stock)
    old_capabilities, capabilities = stock.capabilities(), new.capabilities()
    assert capabilities.outputs.keys() == old_capabilities.outputs.keys()
    assert capabilities.atomic_types == old_capabilities.atomic_types
    assert capabilities.interaction_range == old_capabilities.interaction_range
    assert capabilities.dtype == "float32" and capabilities.length_unit == "angstrom"
    lists, old_lists = new.requested_neighbor_lists(), stock.requested_neighbor_lists()
    assert [o.cutoff for o in lists] == [o.cutoff for o in old_lists]
    assert new.metadata().name == stock.metadata().name


def test_converted_models_can_be_saved_and_converted_again(tiny_pet, water, tmp_path):
    model = metatomic_tc.load(tiny_pet, mode="tf32")
    model.save(tmp_path / "tf32.pt")
    again = metatomic_tc.load(tmp_path / "tf32.pt", mode="fp32")
    assert energy_and_forces(again, water)[0] == energy_and_forces(tiny_pet, water)[0]
    assert used_modes(tmp_path / "tf32.pt") == ["tf32"] and used_modes(tiny_pet) == []


def test_report_of_pet(tiny_pet):
    report = metatomic_tc.conversion_report(load_atomistic_model(tiny_pet), mode="tf32x3")
    left = Counter(
        (layer.in_features, layer.out_features) for layer in report.layers if not layer.replaced
    )
    # in each of two GNN layers 4 -> d_pet; the last layers of nodes and edges, d_head -> 1
    assert left == {(4, 32): 2, (32, 1): 2}
    # per GNN layer: compress 2, attention 2, mlp 2, center 2, center_mlp 2, combination 2; heads 4
    assert report.replaced == 2 * 12 + 4
    assert report.left == 4
    assert len(set(paths(report))) == len(report.layers)
    assert "module.backend.gnn_layers.0.compress.2" in paths(report)


def test_what_is_no_metatomic_model_is_an_error():
    with pytest.raises(TypeError, match="Tanh"):
        metatomic_tc.convert(torch.nn.Tanh())
    with pytest.raises(TypeError, match="str"):
        metatomic_tc.convert("model.pt")


def test_unknown_modes_are_an_error(tiny_pet):
    with pytest.raises(ValueError, match="'bf16x3'"):
        metatomic_tc.load(tiny_pet, mode="bf16x3")
