"""The operator that computes a linear layer with its activation, and its gradients."""

import json
import subprocess
import sys

import metatomic_tc
import pytest
import torch
import torch.nn.functional as F
from metatomic_tc import linear, linear_activation

#: on the CPU bf16x9-eager is bf16x9
MODES = ["fp32", "tf32", "tf32x3", "bf16x9"]
ACTIVATIONS = ["silu", "swiglu"]
MINIMUM = json.loads(torch.ops.metatomic_tc.build_info())["minimum_features"]
forward = torch.ops.metatomic_tc.linear_activation_forward


@pytest.fixture(params=MODES)
def mode(request, device) -> str:
    """Every mode on the CPU; on a GPU those that it supports."""
    if request.param not in metatomic_tc.supported_modes(device):
        pytest.skip(f"{request.param} is not supported on this device")
    return request.param


@pytest.fixture(params=ACTIVATIONS)
def activation(request) -> str:
    return request.param


def activated(product: torch.Tensor, activation: str) -> torch.Tensor:
    """What a model does without the operator."""
    if activation == "silu":
        return F.silu(product)
    value, gate = product.chunk(2, dim=-1)
    return value * torch.sigmoid(gate)


def composition(input, weight, bias, activation: str) -> torch.Tensor:
    return activated(F.linear(input, weight, bias), activation)


def operands(M: int, N: int, K: int, device, seed: int = 0) -> list[torch.Tensor]:
    """Input [M, K], weight [N, K] and bias [N], with products of size one."""
    generator = torch.Generator().manual_seed(seed)
    input = torch.randn(M, K, generator=generator)
    weight = torch.randn(N, K, generator=generator) / K**0.5
    return [t.to(device) for t in (input, weight, torch.randn(N, generator=generator))]


def double(tensors: list) -> list:
    return [None if tensor is None else tensor.double() for tensor in tensors]


def assert_as_accurate_as(result, exact, native, mode: str) -> None:
    """Close to FP64: as close as native FP32 for modes of that level, and TF32 is not."""
    error = (result.double() - exact).abs().max()
    native_error = (native.double() - exact).abs().max()
    if mode == "tf32":
        assert 20 * native_error < error < 2e-2 * exact.abs().max()
    else:
        assert error <= 2 * native_error


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_against_fp64(bias, activation, mode, device):
    arguments = operands(200, 96, 256, device)
    if not bias:
        arguments[2] = None
    result = linear_activation(*arguments, activation, mode)
    exact = composition(*double(arguments), activation)
    assert result.shape == exact.shape and result.dtype == torch.float32
    assert_as_accurate_as(result, exact, composition(*arguments, activation), mode)


def test_it_is_the_activation_of_the_linear_operator(activation, mode, device):
    arguments = operands(70, 64, 128, device)
    expected = activated(linear(*arguments, mode), activation)
    result = linear_activation(*arguments, activation, mode)
    torch.testing.assert_close(result, expected, rtol=2e-6, atol=2e-6)
    output, product = forward(*arguments, activation, mode)
    torch.testing.assert_close(output, result, rtol=0, atol=0)
    torch.testing.assert_close(product, linear(*arguments, mode), rtol=2e-6, atol=2e-6)


def test_fp32_on_the_cpu_is_torch_bit_by_bit(activation):
    for shape in [(7, 33), (2, 5, 128), (128,)]:
        input, weight, bias = torch.randn(shape), torch.randn(40, shape[-1]), torch.randn(40)
        for vector in (bias, None):
            result = linear_activation(input, weight, vector, activation, "fp32")
            assert torch.equal(result, composition(input, weight, vector, activation))


def test_no_mode_is_silently_another(activation, device):
    arguments = operands(256, 256, 256, device)
    names = [name for name in MODES if name in metatomic_tc.supported_modes(device)]
    results = [linear_activation(*arguments, activation, name) for name in names]
    for i, first in enumerate(results):
        for second in results[i + 1 :]:
            assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "shape", [(0, 40), (1, 40), (40,), (2, 3, 5, 40), (2, 0, 40), (37, 40)], ids=str
)
@pytest.mark.parametrize("bias", [True, False])
def test_leading_dimensions(shape, bias, activation, mode, device):
    input, weight = torch.randn(shape, device=device), torch.randn(34, 40, device=device)
    vector = torch.randn(34, device=device) if bias else None
    result = linear_activation(input, weight, vector, activation, mode)
    expected = composition(input, weight, vector, activation)
    assert result.shape == expected.shape and result.is_contiguous()
    assert result.dtype == torch.float32 and result.device == input.device
    tolerance = 0.3 if mode == "tf32" else 1e-3
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=0)
    output, product = forward(input, weight, vector, activation, mode)
    assert torch.equal(output, result)
    assert product.shape == (*shape[:-1], 34) and product.is_contiguous()


@pytest.mark.parametrize("N", [9, 16, 17, 31, 130, 257])
@pytest.mark.parametrize("K", [16, 19, 129])
def test_odd_sizes(N, K, activation, mode, device):
    arguments = operands(45, 2 * N if activation == "swiglu" else N, K, device)
    result = linear_activation(*arguments, activation, mode)
    tolerance = 2e-2 if mode == "tf32" else 1e-5
    expected = composition(*arguments, activation)
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["tf32x3", "fp16x3", "bf16x6", "bf16x9"])
@pytest.mark.parametrize("N, K", [(130, 72), (256, 256)])
def test_many_rows(N, K, mode, activation):
    arguments = operands(17003, 2 * N if activation == "swiglu" else N, K, "cuda")
    output, product = forward(*arguments, activation, mode)
    expected = composition(*double(arguments), activation).float()
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    expected = F.linear(*double(arguments)).float()
    torch.testing.assert_close(product, expected, atol=1e-5, rtol=0)


def test_layouts_do_not_matter(activation, mode, device):
    input, weight, bias = operands(24, 48, 40, device)
    expected = linear_activation(input, weight, bias, activation, mode)

    def check(input, weight, bias, expected=expected):
        result = linear_activation(input, weight, bias, activation, mode)
        assert result.is_contiguous()
        # on a GPU another alignment may mean another kernel, which adds in another order
        tolerance = 0 if device.type == "cpu" else 2e-2 if mode == "tf32" else 1e-5
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)

    check(input.T.contiguous().T, weight.T.contiguous().T, bias)
    wide = torch.zeros(48, 99, device=device)
    wide[:24, 3:83:2] = input
    check(wide[:24, 3:83:2], weight, bias)
    strided = torch.zeros(96, device=device)
    strided[::2] = bias
    check(input, weight, strided[::2])
    row = input[:1].expand(24, 40)
    check(row, weight, bias, linear_activation(row.clone(), weight, bias, activation, mode))


@pytest.mark.parametrize("M", [1, 5, 64])
def test_fp64_is_exactly_torch(M, activation, mode, device):
    arguments = double(operands(M, 34, 40, device))
    result = linear_activation(*arguments, activation, mode)
    torch.testing.assert_close(result, composition(*arguments, activation), rtol=1e-14, atol=1e-14)
    product = forward(*arguments, activation, mode)[1]
    assert torch.equal(product, F.linear(*arguments))


@pytest.mark.parametrize("N, K", [(256, 4), (2, 256), (MINIMUM - 2, 64)])
def test_small_layers_stay_in_fp32(N, K, activation, mode, device):
    arguments = operands(64, N, K, device)
    result = linear_activation(*arguments, activation, mode)
    assert torch.equal(result, linear_activation(*arguments, activation, "fp32"))


def test_the_features_of_the_layer_decide_and_not_those_of_the_result(device):
    # the result has fewer than 16 columns, the layer has enough
    arguments = operands(64, MINIMUM, 64, device)
    result = linear_activation(*arguments, "swiglu", "tf32")
    assert not torch.equal(result, linear_activation(*arguments, "swiglu", "fp32"))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("where", ["input", "weight", "bias"])
def test_inf_and_nan_come_out_as_from_fp32(where, value, activation, mode, device):
    arguments = operands(40, 48, 64, device)
    tensor = arguments[["input", "weight", "bias"].index(where)]
    tensor.view(-1)[7], tensor.view(-1)[40] = value, -value
    result = linear_activation(*arguments, activation, mode)
    expected = composition(*arguments, activation)
    assert not expected.isfinite().all()
    assert torch.equal(result.isnan(), expected.isnan())
    infinite = expected.isinf()
    assert torch.equal(result[infinite], expected[infinite])
    assert torch.equal(result.isinf(), infinite)


# ---- errors --------------------------------------------------------------------------------------


def test_an_odd_number_of_features_has_no_halves(device):
    for operator in (linear_activation, forward):
        with pytest.raises(ValueError, match=r"even.*swiglu.*found a weight of shape \[33, 40\]"):
            operator(*operands(4, 33, 40, device), "swiglu", "tf32x3")


@pytest.mark.parametrize("name", ["", "SiLU", "relu", "none"])
def test_unknown_activations_are_an_error_that_names_the_valid_ones(name, device):
    with pytest.raises(ValueError, match=f"silu and swiglu, but found '{name}'"):
        linear_activation(*operands(4, 32, 32, device), name, "tf32x3")


def test_other_errors_are_those_of_linear(activation, device):
    input, weight, bias = operands(4, 32, 32, device)
    with pytest.raises(TypeError, match="Float and Double"):
        linear_activation(input, weight.double(), bias, activation, "tf32x3")
    with pytest.raises(TypeError, match="Half"):
        linear_activation(input.half(), weight.half(), None, activation, "tf32x3")
    with pytest.raises(ValueError, match=r"found \[31\]"):
        linear_activation(input, weight, bias[:31], activation, "tf32x3")
    for tensors in ((input, weight, bias), [t.to("meta") for t in (input, weight, bias)]):
        with pytest.raises(ValueError, match="'tf33'"):
            linear_activation(*tensors, activation, "tf33")


# ---- gradients -----------------------------------------------------------------------------------


def fp64_arguments(bias: bool, device) -> list:
    arguments = double(operands(6, 18, 17, device))
    arguments[0] = arguments[0].reshape(2, 3, 17)
    arguments = [tensor.requires_grad_(True) for tensor in arguments]
    return arguments if bias else [*arguments[:2], None]


@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck_of_first_and_second_order(bias, activation, mode, device):
    arguments = fp64_arguments(bias, device)
    function = lambda *tensors: linear_activation(*tensors, activation, mode)  # noqa: E731
    assert torch.autograd.gradcheck(function, arguments, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, arguments, fast_mode=True)


def test_gradcheck_of_both_results_of_the_forward(activation, mode, device):
    arguments = fp64_arguments(True, device)
    function = lambda *tensors: forward(*tensors, activation, mode)  # noqa: E731
    assert torch.autograd.gradcheck(function, arguments, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, arguments, fast_mode=True)


def test_gradients_against_fp64(activation, mode, device):
    arguments = operands(200, 96, 256, device)
    shape = composition(*arguments, activation).shape
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)

    def gradients(function, tensors, grad):
        leaves = [tensor.detach().requires_grad_(True) for tensor in tensors]
        return torch.autograd.grad(function(*leaves), leaves, grad)

    found = gradients(lambda *t: linear_activation(*t, activation, mode), arguments, grad)
    native = gradients(lambda *t: composition(*t, activation), arguments, grad)
    exact = gradients(lambda *t: composition(*t, activation), double(arguments), grad.double())
    assert_as_accurate_as(found[0], exact[0], native[0], mode)
    # the weight's and the bias's are those of PyTorch, at the point that the mode reached
    for result, expected in zip(found[1:], exact[1:], strict=True):
        error = (result.double() - expected).abs().max() / expected.abs().max()
        assert error < (5e-3 if mode == "tf32" else 1e-5)


def test_the_input_gradient_uses_the_mode(activation, mode, device):
    input, weight, bias = operands(64, 96, 128, device)
    input.requires_grad_(True)
    output = linear_activation(input, weight, bias, activation, mode)
    grad = torch.randn_like(output)
    (result,) = torch.autograd.grad(output, input, grad)
    _, product = forward(input.detach(), weight, bias, activation, mode)
    if activation == "silu":
        through = torch.ops.aten.silu_backward(grad, product)
    else:
        through = torch.ops.metatomic_tc.glu_backward(grad, product)
    expected = torch.ops.metatomic_tc.linear_input_gradient(through, weight, mode)
    assert torch.equal(result, expected)


def test_double_backward_of_a_network(activation, mode, device):
    """Training on forces: the gradient of a function of the input gradient."""
    input, weight, bias = operands(20, 64, 32, device)
    last = torch.randn(64 if activation == "silu" else 32, 1, device=device)

    def loss(layer):
        x, w, b = (t.clone().requires_grad_(True) for t in (input, weight, bias))
        (forces,) = torch.autograd.grad((layer(x, w, b) @ last).sum(), x, create_graph=True)
        return torch.autograd.grad(forces.pow(2).sum(), [x, w, b])

    tolerance = 5e-2 if mode == "tf32" else 1e-4
    found = loss(lambda *tensors: linear_activation(*tensors, activation, mode))
    expected = loss(lambda *tensors: composition(*tensors, activation))
    for result, wanted in zip(found, expected, strict=True):
        scale = wanted.abs().max().item()
        torch.testing.assert_close(result, wanted, rtol=0, atol=tolerance * scale)


def test_only_the_gradients_that_are_asked_for_are_there(activation, device):
    input, weight, bias = operands(30, 48, 40, device)
    input.requires_grad_(True)
    linear_activation(input, weight, bias, activation, "tf32x3").sum().backward()
    assert input.grad is not None and weight.grad is None and bias.grad is None
    with torch.no_grad():
        assert not linear_activation(input, weight, bias, activation, "tf32x3").requires_grad
    assert not linear_activation(input.detach(), weight, bias, activation, "tf32x3").requires_grad
    bias.requires_grad_(True)
    linear_activation(input.detach(), weight, bias, activation, "tf32x3").sum().backward()
    assert bias.grad is not None and weight.grad is None


def test_what_the_gradient_needs_is_kept_only_for_one(activation):
    input, weight, bias = operands(30, 48, 40, "cpu")

    def calls(input) -> list[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            linear_activation(input, weight, bias, activation, "tf32x3")
        return [event.name for event in profile.events()]

    name = "metatomic_tc::linear_activation_forward"
    assert name not in calls(input)
    assert name in calls(input.clone().requires_grad_(True))
    with torch.no_grad():
        assert name not in calls(input.clone().requires_grad_(True))


# ---- PyTorch machinery ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["linear_activation", "linear_activation_forward"])
def test_opcheck(name, requires_grad, bias, activation, device):
    input, weight, vector = (t.requires_grad_(requires_grad) for t in operands(6, 48, 32, device))
    input = input.detach().reshape(2, 3, 32).requires_grad_(requires_grad)
    arguments = (input, weight, vector if bias else None, activation, "tf32x3")
    torch.library.opcheck(getattr(torch.ops.metatomic_tc, name), arguments)


def test_meta_tensors():
    input, weight = torch.ones(2, 3, 32, device="meta"), torch.ones(48, 32, device="meta")
    assert linear_activation(input, weight, None, "silu", "tf32x3").shape == (2, 3, 48)
    result = linear_activation(input, weight, None, "swiglu", "tf32x3")
    assert result.shape == (2, 3, 24) and result.device.type == "meta"


class FeedForward(torch.nn.Module):
    def __init__(self, activation: str, mode: str):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(32, 64)
        self.second = torch.nn.Linear(64 if activation == "silu" else 32, 32)
        self.activation, self.mode = activation, mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.metatomic_tc.linear_activation(
            x, self.first.weight, self.first.bias, self.activation, self.mode
        )
        return self.second(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_torch_compile_of_forward_and_backward(backend, activation, device, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    network = FeedForward(activation, "tf32x3").to(device)
    compiled = torch.compile(network, fullgraph=True, backend=backend, dynamic=True)
    for rows in (20, 33):
        input = torch.randn(rows, 32, device=device, requires_grad=True)
        result, expected = compiled(input), network(input)
        torch.testing.assert_close(result, expected)
        (found,) = torch.autograd.grad(result.sum(), input)
        (wanted,) = torch.autograd.grad(expected.sum(), input)
        torch.testing.assert_close(found, wanted)


def test_script_save_load_in_a_fresh_process(device, tmp_path):
    networks = [FeedForward(name, "tf32x3") for name in ACTIVATIONS]
    network = torch.nn.Sequential(*networks).to(device)
    input = torch.randn(20, 32, device=device, requires_grad=True)
    expected = network(input)
    (gradient,) = torch.autograd.grad(expected.pow(2).sum(), input)
    torch.jit.script(network).save(tmp_path / "network.pt")
    torch.save((input.detach(), expected.detach(), gradient), tmp_path / "values.pt")
    library = next(path for path in torch.ops.loaded_libraries if "libmetatomic_tc" in path)
    code = f"""
import torch
torch.set_num_threads(1)
torch.ops.load_library({library!r})
network = torch.jit.load("network.pt")
input, expected, gradient = torch.load("values.pt")
for _ in range(3):
    input = input.detach().requires_grad_(True)
    result = network(input)
    torch.testing.assert_close(result, expected)
    result.pow(2).sum().backward()
    torch.testing.assert_close(input.grad, gradient)
print("same")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "same", done.stderr


# ---- GPU only ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cuda_graphs_can_capture_it(activation):
    device = torch.device("cuda")
    input, weight, bias = operands(1000, 256, 128, device)
    for mode in set(MODES) & set(metatomic_tc.supported_modes(device)):
        static = input.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward(static, weight, bias, activation, mode)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = forward(static, weight, bias, activation, mode)
        for seed in range(3):
            fresh = operands(1000, 256, 128, device, seed)[0]
            static.copy_(fresh)
            graph.replay()
            torch.cuda.synchronize()
            for result, expected in zip(
                results, forward(fresh, weight, bias, activation, mode), strict=True
            ):
                assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (7, 34), (2, 3, 512), (5, 0)])
def test_gradient_of_the_gated_activation(shape, dtype, device):
    generator = torch.Generator().manual_seed(0)
    product = 5 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    gradient = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator, dtype=torch.float64)
    if product.numel() > 0:
        product.view(-1)[-2:] = torch.tensor([torch.inf, -1000.0])
    expected = torch.ops.aten.glu_backward(gradient, product, -1)
    arguments = [x.to(device=device, dtype=dtype) for x in (gradient, product)]
    # expanded, and every second element of a larger tensor
    strided = [torch.stack([x, x], dim=-1)[..., 0] for x in arguments]
    found = torch.ops.metatomic_tc.glu_backward(*arguments)
    again = torch.ops.metatomic_tc.glu_backward(*strided)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(
        found.double().cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    torch.testing.assert_close(found, again, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_the_gradient_of_the_gated_activation_refuses_what_does_not_fit(device):
    product = torch.zeros(3, 8, device=device)
    for gradient in (torch.zeros(3, 8), torch.zeros(2, 4), torch.zeros(())):
        with pytest.raises(ValueError, match="with the sizes of the gradient"):
            torch.ops.metatomic_tc.glu_backward(gradient.to(device), product)
    with pytest.raises(TypeError, match="two float32 or float64 tensors"):
        torch.ops.metatomic_tc.glu_backward(torch.zeros(3, 4, device=device).half(), product)
