"""`metatomic-tc bench gemm`."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from metatomic_tc.bench import gemm, pet_layers, report
from metatomic_tc.bench.cases import pet_cases
from metatomic_tc.cli import main

ROOT = Path(__file__).resolve().parent.parent.parent
KEYS = {
    "M", "N", "K", "direction", "implementation", "ms", "tflops", "ratio", "error_rms",
    "error_max", "error_mean", "data", "kernel", "model", "atoms", "gpu", "versions", "date",
}  # fmt: skip


def bench(path, *arguments):
    """The exit code, and the records that were written."""
    code = main(["bench", "gemm", "--output", str(path), "--rounds", "1", *arguments])
    return code, json.loads(path.read_text())


@pytest.fixture(scope="module")
def cpu_run(tmp_path_factory):
    """Directory and records of a run on the CPU."""
    path = tmp_path_factory.mktemp("bench") / "out.json"
    arguments = ["--device", "cpu", "--shapes", "96x32x64,33x20x48", "--modes", "tf32x3,bf16x9"]
    code, records = bench(path, *arguments)
    assert code == 0
    return path.parent, records


def test_there_is_a_record_for_each_product_implementation_and_kind_of_data(cpu_run):
    _, records = cpu_run
    found = [
        (r["M"], r["N"], r["K"], r["direction"], r["implementation"], r["data"]) for r in records
    ]
    assert found == [
        (*shape, direction, implementation, data)
        for shape in [(96, 32, 64), (33, 20, 48)]
        for direction in ["forward", "input_gradient"]
        for implementation in ["cpu-fp32", "cpu-tf32", "tf32x3", "bf16x9"]
        for data in ["normal", "same-sign", "wide"]
    ]
    assert all(record.keys() == KEYS for record in records)
    assert {record["kernel"] for record in records} == {"cpu-fp32", "cpu-emulated"}


def test_speeds_follow_from_the_times(cpu_run):
    _, records = cpu_run
    baseline = {
        (r["M"], r["direction"]): r["ms"] for r in records if r["implementation"] == "cpu-fp32"
    }
    for record in records:
        operations = 2 * record["M"] * record["N"] * record["K"]
        assert record["tflops"] == pytest.approx(1e-9 * operations / record["ms"], rel=2e-3)
        ratio = baseline[record["M"], record["direction"]] / record["ms"]
        assert record["ratio"] == pytest.approx(ratio, rel=2e-3)


def test_errors_tell_one_pass_tf32_from_the_rest(cpu_run):
    _, records = cpu_run
    for record in records:
        assert abs(record["error_mean"]) <= record["error_rms"] <= record["error_max"]
        if record["implementation"] == "cpu-tf32":
            assert record["error_rms"] > 100
        else:
            assert 0 < record["error_rms"] < 10


def test_the_plot_is_written(cpu_run):
    pytest.importorskip("matplotlib")
    directory, _ = cpu_run
    assert (directory / "out.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_a_sentence_and_no_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["--device", "cpu", "--shapes", "16x16x16", "--modes", "tf32x3"]
    code, records = bench(tmp_path / "out.json", *arguments)
    assert code == 0 and records
    output = capsys.readouterr().out
    assert "needs matplotlib" in output and "metatomic-tc[bench]" in output
    assert not (tmp_path / "out.png").exists()


def test_pet_shapes_and_the_name_of_the_file(tmp_path, capsys):
    arguments = ["--device", "cpu", "--sizes", "xs", "--atoms", "3", "--directions", "forward"]
    arguments += ["--modes", "tf32x3", "--rounds", "1", "--no-plot", "--output", str(tmp_path)]
    assert main(["bench", "gemm", *arguments]) == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("gemm-cpu-20") and path.suffix == ".json"
    records = json.loads(path.read_text())
    assert {(record["atoms"], *record["model"]) for record in records} == {(3, "xs")}
    assert {record["M"] for record in records} == {3, 3 * 30, 3 * 31}
    output = capsys.readouterr()
    assert "TFLOP/s (times cpu-fp32)" in output.out and str(path) in output.out
    assert "PET-XS, 3 atoms, forward 93 x 384 x 128" in output.err and "s left" in output.err


def test_products_that_sizes_share_are_measured_once():
    cases = pet_cases(["xs", "s"], [192], ["forward", "input_gradient"])
    keys = [(case.direction, case.M, case.N, case.K) for case in cases]
    assert len(set(keys)) == len(keys)
    assert min(min(case.N, case.K) for case in cases) == 128
    (shared,) = [case for case in cases if str(case) == "forward 192 x 256 x 1024"]
    assert shared.models == ["s"]
    (node,) = [case for case in cases if str(case) == "input_gradient 192 x 1024 x 4096"]
    assert node.weight_shape == (4096, 1024)


def test_an_interrupted_run_keeps_what_is_done(tmp_path, monkeypatch, capsys):
    measure = gemm.measure

    def interrupted(case, *arguments):
        if case.direction == "input_gradient":
            raise KeyboardInterrupt
        return measure(case, *arguments)

    monkeypatch.setattr(gemm, "measure", interrupted)
    arguments = ["--device", "cpu", "--shapes", "16x16x16", "--modes", "tf32x3"]
    code, records = bench(tmp_path / "out.json", *arguments)
    assert code == 130
    assert {record["direction"] for record in records} == {"forward"}
    assert "TFLOP/s" in capsys.readouterr().out


def test_what_fails_is_a_record_with_the_reason(tmp_path, monkeypatch, capsys):
    random_matrix = gemm.random_matrix

    def with_infinity(shape, data, generator):
        matrix = random_matrix(shape, data, generator)
        if data == "wide":
            matrix[0, 0] = float("inf")
        return matrix

    monkeypatch.setattr(gemm, "random_matrix", with_infinity)
    arguments = ["--device", "cpu", "--shapes", "16x16x16", "--modes", "tf32x3", "--no-plot"]
    code, records = bench(tmp_path / "out.json", *arguments)
    assert code == 0
    for record in records:
        assert record["ms"] > 0
        assert ("error" in record) == (record["error_rms"] is None) == (record["data"] == "wide")
    assert "compared elements are not finite" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--sizes", "s,xl"], "found 'xl', but the choices are: xs, s, m, l"),
        (["--modes", "tf32x4"], "'tf32x4'"),
        (["--directions", "backward"], "the choices are: forward, input_gradient"),
        (["--shapes", "16x16"], "found '16x16', but expected three positive numbers"),
        (["--shapes", "16x0x16"], "found '16x0x16'"),
        (["--atoms", "many"], "found 'many', but expected a positive number"),
        (["--rounds", "0"], "found '0'"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["bench", "gemm", "--device", "cpu", *arguments])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_a_device_that_cannot_be_used(capsys):
    assert main(["bench", "gemm", "--device", "cuda:99"]) == 1
    assert "--device cuda:99 cannot be used here" in capsys.readouterr().err
    assert main(["bench", "gemm", "--device", "abacus"]) == 1
    assert "--device abacus cannot be used here" in capsys.readouterr().err


def test_ceilings_of_known_gpus():
    assert dict(report.ceilings("NVIDIA H200"))["FP16 / 3"] == pytest.approx(330, rel=0.01)
    assert report.ceilings("NVIDIA A100-SXM4-80GB") == report.ceilings(None) == []


def test_the_table_of_layers_is_that_of_the_model(monkeypatch):
    pytest.importorskip("metatrain")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    padded, layers = importlib.import_module("pet_layers").linear_layers("xs")
    assert padded == pet_layers.PADDED_NEIGHBORS["xs"]
    assert layers == pet_layers.LINEAR_LAYERS["xs"]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["300x128x64", "33x17x50"])
def test_on_a_gpu(shape, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    code, records = bench(tmp_path / "out.json", "--shapes", shape, "--no-plot")
    assert code == 0
    implementations = {record["implementation"] for record in records}
    assert {"cublas-fp32", "cublas-tf32", "cutlass-3xtf32", "tf32x3"} <= implementations
    for record in records:
        if record["implementation"] == "triton-tf32x3":
            continue  # not of this library, and Triton may be missing
        assert "error" not in record, record
        assert record["ms"] > 0 and record["ratio"] > 0
        if record["implementation"] == "cublas-tf32":
            assert record["error_rms"] > 50
        else:
            assert record["error_rms"] < 10
