"""Rewriting the linear layers of TorchScript modules and metatomic models."""

import io
from collections import Counter
from dataclasses import replace

import metatomic_tc
import pytest
import torch
import torch.nn.functional as F
from metatomic.torch import AtomisticModel, load_atomistic_model
from metatomic_tc import modes
from metatomic_tc.export import export
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


# ---- fused activations ---------------------------------------------------------------------------


class FeedForward(torch.nn.Module):
    """That of PET."""

    def __init__(self, swiglu: bool, width: int = 48, bias: bool = True):
        super().__init__()
        self.w_in = torch.nn.Linear(32, 2 * width if swiglu else width, bias=bias)
        self.w_out = torch.nn.Linear(width, 32, bias=bias)
        self.activation = torch.nn.Identity() if swiglu else F.silu
        self.is_swiglu = swiglu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_swiglu:
            v, g = self.w_in(x).chunk(2, dim=-1)
            x = v * torch.sigmoid(g)
            x = self.w_out(x)
        else:
            x = self.w_in(x)
            x = self.activation(x)
            x = self.w_out(x)
        return x


class Head(torch.nn.Sequential):
    def __init__(self):
        layers = [torch.nn.Linear(32, 40), torch.nn.SiLU(), torch.nn.Linear(40, 32)]
        super().__init__(*layers, torch.nn.SiLU(), torch.nn.Linear(32, 1))


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            [
                FeedForward(True),
                FeedForward(True),
                FeedForward(False),
                FeedForward(True, bias=False),
            ]
        )
        self.head = Head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def outputs_and_gradients(module, input: torch.Tensor) -> list[torch.Tensor]:
    """Value, gradient, and the gradient of its square."""
    results = []
    for _ in range(3):  # the profiling executor optimizes after two runs
        input = input.detach().requires_grad_(True)
        output = module(input)
        (gradient,) = torch.autograd.grad(output.sum(), input, create_graph=True)
        (second,) = torch.autograd.grad(gradient.pow(2).sum(), input)
        results = [output.detach(), gradient.detach(), second]
    return results


def test_activations_after_linear_layers_are_fused():
    torch.manual_seed(0)
    module, input = Network(), torch.randn(10, 32)
    new, report = converted(module, "tf32x3")
    # one in each block, two in the head; the blocks' other branches never run
    assert report.fused == 4 + 2
    # each layer is counted once
    assert len(report.layers) == 11 and len(set(paths(report))) == 11
    assert report.left == 1 and "blocks.3.w_in" in paths(report)
    code = new.inlined_graph
    assert not code.findAllNodes("aten::linear", True) and not code.findAllNodes("aten::silu", True)
    for found, expected in zip(
        outputs_and_gradients(new, input), outputs_and_gradients(module, input), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert not torch.equal(found, expected)


def test_fp32_is_bit_by_bit_the_unmodified_module_from_any_mode():
    torch.manual_seed(0)
    module, input = Network(), torch.randn(10, 32)
    expected = outputs_and_gradients(module, input)
    direct, report = converted(module, "fp32")
    fused, _ = converted(module, "tf32")
    back, back_report = converted(fused, "fp32")
    assert report.fused == 0 and back_report == report
    # TorchScript's own optimizations add gradients in another order
    with torch.jit.optimized_execution(False):
        for new in (direct, back):
            for found, wanted in zip(outputs_and_gradients(new, input), expected, strict=True):
                assert torch.equal(found, wanted)


def test_fused_activations_change_their_mode_too():
    torch.manual_seed(0)
    module, input = Network(), torch.randn(10, 32)
    direct, report = converted(module, "tf32x3")
    steps, other = module, None
    for mode in ("tf32", "fp32", "bf16x9", "tf32x3"):
        steps, other = converted(steps, mode)
        assert paths(other) == paths(report)
        assert (other.replaced, other.left) == (report.replaced, report.left)
    assert other == report
    for found, wanted in zip(
        outputs_and_gradients(steps, input), outputs_and_gradients(direct, input), strict=True
    ):
        assert torch.equal(found, wanted)


class NotFused(torch.nn.Module):
    """What looks like a layer with an activation, but is more or something else."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)
        self.three = torch.nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        used_twice = self.layer(x)
        a = F.silu(used_twice) + used_twice
        v, g = self.layer(x).chunk(2, dim=-1)
        b = v * torch.sigmoid(g) * g
        g, v = self.layer(x).chunk(2, dim=-1)
        b = b + v * torch.sigmoid(g)
        v, g = self.layer(x).chunk(2, dim=0)
        a = a + torch.cat([v * torch.sigmoid(g)] * 2)
        v, g = self.three(x).chunk(2, dim=-1)  # halves of two and one columns
        changed = self.layer(x)
        changed.add_(1)
        a = a + F.silu(changed) + torch.relu(self.layer(x)) + F.silu(self.layer(x), inplace=True)
        return a, b + (v * torch.sigmoid(g)).sum()


def test_other_patterns_are_left_alone():
    module, input = NotFused(), torch.randn(10, 32)
    new, report = converted(module, "tf32x3")
    assert report.fused == 0 and sorted(paths(report)) == ["layer", "three"]
    for found, expected in zip(new(input), module(input), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def small_function(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x)


def free_layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(F.linear(x, weight))


class Functions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)
        self.weight = torch.nn.Parameter(torch.randn(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = small_function(self.layer(x))
        y = F.linear(x, self.weight)
        x = x + 1  # not the input of the layer above
        v, g = y.chunk(2, dim=-1)
        for _ in range(2):
            x = x + free_layer(x, self.weight[:32])
        return x + torch.sigmoid(g) * v


def test_functions_and_layers_that_are_no_modules_are_fused():
    module, input = Functions(), torch.randn(10, 32)
    new, report = converted(module, "tf32")
    assert report.fused == 3 and len(report.layers) == 3
    again, again_report = converted(new, "tf32")
    assert again_report == report
    layer, fused = module.layer, metatomic_tc.linear_activation
    x = fused(input, layer.weight, layer.bias, "silu", "tf32")
    y = fused(x, module.weight, None, "swiglu", "tf32")
    x = x + 1
    for _ in range(2):
        x = x + fused(x, module.weight[:32], None, "silu", "tf32")
    for network in (new, again):
        torch.testing.assert_close(network(input), x + y)


def test_an_input_changed_in_place_after_the_layer_does_not_matter():
    class InPlace(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            y = self.layer(x)
            x.zero_()
            return F.silu(y) + x

    module, input = InPlace(), torch.randn(10, 32)
    new, report = converted(module, "tf32x3")
    assert report.fused == 1
    torch.testing.assert_close(new(input), module(input), rtol=1e-4, atol=1e-4)


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


def test_activations_of_pet_are_fused(demo_model):
    model, report = convert_with_report(load_atomistic_model(demo_model), "tf32x3")
    found = Counter(
        node.inputsAt(3).toIValue()
        for module in model.module.modules()
        if hasattr(module, "forward")
        for node in module.graph.findAllNodes("metatomic_tc::linear_activation", True)
    )
    # per GNN layer: SwiGLU in mlp and center_mlp, SiLU in compress and in the combination; SiLU
    # twice in the node head and twice in the edge head
    assert found == {"swiglu": 2 * 2, "silu": 2 * 2 + 4}
    assert report.fused == 12

    def without_kernels(report):
        return replace(report, layers=[replace(layer, kernels=[]) for layer in report.layers])

    again = metatomic_tc.conversion_report(model, "tf32")
    assert without_kernels(again) == without_kernels(replace(report, mode="tf32"))


def test_the_report_names_kernels(tiny_pet_checkpoint, tmp_path):
    """Of every layer, forward and input gradient, and of attention."""
    export(tiny_pet_checkpoint, tmp_path / "flat.pt", mode="fp32")
    model = metatomic_tc.load(tmp_path / "flat.pt")
    report = metatomic_tc.conversion_report(model, "tf32x3")
    here = modes.hardware("cuda" if torch.cuda.is_available() else "cpu")
    for layer in report.layers:
        used = "tf32x3" if layer.replaced else "fp32"
        forward = modes.plan(used, here, 2**20, layer.out_features, layer.in_features)
        gradient = modes.plan(
            used, here, 2**20, layer.in_features, layer.out_features, forward=False
        )
        assert layer.kernels == list(dict.fromkeys([forward["name"], gradient["name"]]))
    # 4 heads of 32 columns together, in two GNN layers
    assert [layer.head_size for layer in report.attention] == [8, 8]
    assert {layer.kernel for layer in report.attention} == {
        "attention-cuda" if here["cuda"] else "attention-cpu"
    }
    assert all(layer.path.startswith("module.") for layer in report.attention)


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
    # per GNN layer: mlp, center_mlp, compress and combination; heads 4
    assert report.fused == 2 * 4 + 4
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


# ---- chosen layers -------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", ["blocks.1.*", "!blocks.1.*", "by_name.?", "*.[02].0", "none"])
def test_only_chosen_layers_use_the_mode(layers):
    """Also where layers of one shape share their code."""
    torch.manual_seed(0)
    module, x = Nested(), torch.randn(10, 32)
    content, report = convert_script_module(torch.jit.script(module), "tf32", layers)
    chosen = {
        "blocks.1.*": {"blocks.1.0"},
        "!blocks.1.*": {"blocks.0.0", "blocks.2.0", "by_name.a"},
        "by_name.?": {"by_name.a"},
        "*.[02].0": {"blocks.0.0", "blocks.2.0"},
        "none": set(),
    }[layers]
    assert {layer.path for layer in report.layers if layer.replaced} == chosen
    assert len(report.layers) == 5

    def apply(path, layer, x):
        mode = "tf32" if path in chosen else "fp32"
        return metatomic_tc.linear(x, layer.weight, layer.bias, mode)

    expected = x
    for i, block in enumerate(module.blocks):
        expected = torch.tanh(apply(f"blocks.{i}.0", block[0], expected))
    expected = module.last(apply("by_name.a", module.by_name["a"], expected))
    new = load_script_module(content)
    assert torch.equal(new(x), expected)

    # Another conversion starts from the layers, not from this choice.
    again, report = converted(new, "tf32")
    assert report.replaced == 4
    assert torch.equal(again(x), converted(module, "tf32")[0](x))


def test_an_empty_pattern():
    with pytest.raises(Exception, match="the pattern for the paths of layers is empty"):
        convert_script_module(torch.jit.script(Nested()), "tf32", "!")
