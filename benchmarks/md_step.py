"""Times one MD step (energy, forces, virial) of PET in every mode, beside stock metatomic.

    python benchmarks/md_step.py --device cuda --sizes s --atoms 192,5184,17280 --compiled

Modes: stock-fp32 and stock-tf32 are the TorchScript model as metatomic exports it; compiled-fp32
and compiled-tf32 (with --compiled) are PET under torch.compile, which no metatomic engine runs; the
others are modes of metatomic-tc as its pair style runs them: its own PET backend, a step being one
CUDA graph. "MODE/whole" has the same backend behind metatomic's and metatrain's classes, without a
graph, and "MODE/stock" metatrain's backend. Every (size, atoms) runs in a process of its own, and
the compiled modes in a second. Within a process the modes take turns, so that a change of the clock
or of the load meets them all. A mode that fails becomes a record with "error".

Writes a list of records:
    model, atoms, mode
    ms              median time of a step
    ratio           ms of stock-fp32 in the same process, divided by ms: larger is faster
    memory_gib      peak in a step, weights included (GPU only)
    energy_error    against stock-fp32, eV per atom
    force_error     against stock-fp32, largest component, eV/Å
    virial_error    against stock-fp32, largest component, eV per atom
    force_rms       eV/Å
    gpu, versions
The errors of stock-fp32 are those of a second evaluation: its run-to-run noise.
"""

import argparse
import contextlib
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
STOCK = ["stock-fp32", "stock-tf32"]
COMPILED = ["compiled-fp32", "compiled-tf32"]


def compiled_step(backend, hypers, system):
    """One step with the compiled functions of PET's backend, on plain tensors."""
    import torch

    (request,) = system.known_neighbor_lists()
    samples = system.get_neighbor_list(request).samples.values.long()
    positions = system.positions.detach().clone().requires_grad_(True)
    strain = torch.eye(3, dtype=positions.dtype, device=positions.device, requires_grad=True)
    cells = (system.cell @ strain)[None]
    structure = torch.zeros(len(positions), dtype=torch.long, device=positions.device)
    with torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True, specialize_int=True
    ):
        batch = backend.preprocess(
            positions @ strain,
            samples[:, 0],
            samples[:, 1],
            system.types.long(),
            cells,
            samples[:, 2:5],
            structure,
            float(hypers["cutoff_width_adaptive"]),
        )
        nodes, edges = backend.calculate_features(batch)
        predictions, _, _ = backend.predict(nodes, edges, batch, cells, structure, ["energy"])
    energies = predictions["energy"][0].double()
    forces, virial = torch.autograd.grad(-energies.sum(), (positions, strain))
    return energies.detach(), forces, virial


@contextlib.contextmanager
def one_pass_tf32(mode):
    """Sets torch's process-wide TF32 flag, for the modes that are defined by it alone."""
    import torch

    flag = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = mode in ("stock-tf32", "compiled-tf32")
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = flag


def make_step(mode, size, system, seed, options):
    """A function without arguments that does one step in `mode`."""
    import metatomic_tc
    import torch
    from metatomic_tc.pet import replace_backend
    from metatomic_tc.pet.step import Step
    from metatomic_tc.validate.evaluation import step as metatomic_step
    from pet_models import build_pet

    device = system.device
    model, hypers = build_pet(size, seed)
    if mode in COMPILED:
        backend = model.to(device).backend
        for name in ("preprocess", "calculate_features", "predict"):
            setattr(backend, name, torch.compile(getattr(backend, name)))
        return lambda: compiled_step(backend, hypers, system)

    arithmetic, _, way = mode.partition("/")
    if mode not in STOCK and way != "stock":
        reason = replace_backend(model)
        if reason is not None:
            raise RuntimeError(f"the backend of metatomic-tc does not take this model: {reason}")
    exported = model.export().eval()
    if mode not in STOCK:
        exported = metatomic_tc.convert(exported, mode=arithmetic)
    if mode not in STOCK and not way:
        step = Step(exported, device=device)
        step.set_system(system)
        return functools.partial(step, system.positions, system.cell)
    scripted = torch.jit.script(exported).to(device)
    for parameter in scripted.parameters():
        parameter.requires_grad_(False)
    return lambda: metatomic_step(scripted, system, options)


def build_system(size, n_atoms, seed, device):
    """The water box as a metatomic system with the neighbor list that PET asks for."""
    import torch
    import vesin.metatomic
    from metatomic.torch import systems_to_torch
    from pet_models import build_pet, water

    system = systems_to_torch(water(n_atoms), dtype=torch.float32)
    exported = build_pet(size, seed)[0].export()
    vesin.metatomic.compute_requested_neighbors(
        system, system_length_unit="angstrom", model=exported
    )
    return system.to(device=device)


def measure(size, n_atoms, modes, device, rounds, seed):
    """Records of all `modes`, which take turns in this process; the first one is the reference."""
    import torch
    from metatomic.torch import ModelEvaluationOptions, ModelOutput

    gpu = torch.cuda if device.startswith("cuda") else None
    options = ModelEvaluationOptions(
        length_unit="angstrom", outputs={"energy": ModelOutput(unit="eV", sample_kind="atom")}
    )
    records = {mode: {"model": size, "atoms": n_atoms, "mode": mode} for mode in modes}
    system_memory = -gpu.memory_allocated() if gpu else 0
    system = build_system(size, n_atoms, seed, device)
    system_memory += gpu.memory_allocated() if gpu else 0

    steps, reference = {}, None
    for mode in modes:
        try:
            with one_pass_tf32(mode):
                model_memory = -gpu.memory_allocated() if gpu else 0
                start = time.perf_counter()
                step = make_step(mode, size, system, seed, options)
                for _ in range(4 if gpu else 2):  # TorchScript specialises in its first runs
                    result = step()
                if gpu:
                    gpu.synchronize()
                    result = None
                    model_memory += gpu.memory_allocated()
                    step_memory = -gpu.memory_allocated()
                    gpu.reset_peak_memory_stats()
                    result = step()
                    gpu.synchronize()
                    step_memory += gpu.max_memory_allocated()
                    # The memory of a graph is there all the time, and its tensors are not seen.
                    graph = getattr(getattr(step, "func", None), "graph_memory", 0)
                    step_memory = max(step_memory, graph)
                    records[mode]["memory_gib"] = round(
                        (system_memory + model_memory + step_memory) / 2**30, 3
                    )
                warm_up = time.perf_counter() - start
                if mode == modes[0]:
                    reference, result = result, step()
            records[mode] |= errors(result, reference)
            steps[mode] = step
            log(f"PET-{size.upper()}, {n_atoms} atoms, {mode}: ready after {warm_up:.1f} s")
        except (
            Exception
        ) as error:  # e.g. out of memory, or a failure of the compiler: the other modes go on
            records[mode]["error"] = first_line(error)
            log(f"PET-{size.upper()}, {n_atoms} atoms, {mode}: {first_line(error)}")
        step = result = None
        if gpu:
            gpu.empty_cache()

    times = {mode: [] for mode in steps}
    for turn in range(rounds):
        for mode, step in steps.items():
            with one_pass_tf32(mode):
                step()  # the first step after a change of model also moves the cached memory around
                for _ in range(3 if n_atoms < 1000 else 2):
                    if gpu:
                        gpu.synchronize()
                    start = time.perf_counter()
                    step()
                    if gpu:
                        gpu.synchronize()
                    times[mode].append(time.perf_counter() - start)
        log(f"PET-{size.upper()}, {n_atoms} atoms: round {turn + 1} of {rounds}")
    for mode in steps:
        records[mode]["ms"] = round(1e3 * statistics.median(times[mode]), 3)
        if modes[0] in steps:
            records[mode]["ratio"] = round(
                statistics.median(times[modes[0]]) / statistics.median(times[mode]), 3
            )
    return list(records.values())


def errors(result, reference):
    """How far energies, forces and virial are from the reference."""
    energies, forces, virial = (values.cpu().double() for values in result)
    if reference is not None:
        reference = [values.cpu().double() for values in reference]
    sizes = {"force_rms": forces.pow(2).mean().sqrt().item()}
    if reference is not None:
        sizes |= {
            "energy_error": abs((energies.sum() - reference[0].sum()).item()) / len(forces),
            "force_error": (forces - reference[1]).abs().max().item(),
            "virial_error": (virial - reference[2]).abs().max().item() / len(forces),
        }
    return sizes


def log(message):
    print(message, file=sys.stderr, flush=True)


def first_line(error):
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    return lines[0][:300]


def hardware(device):
    """What the records say about the machine: (gpu, versions)."""
    import torch
    from metatomic_tc.info import versions

    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return gpu, versions(["metatomic-torch", "metatensor-torch", "metatrain"])


def measure_in_subprocess(size, n_atoms, modes, arguments):
    """`measure` in a fresh process; when it dies, every mode gets a record that says so."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        job = {
            "size": size, "n_atoms": n_atoms, "modes": modes,
            "device": arguments.device, "rounds": arguments.rounds, "seed": arguments.seed,
        }  # fmt: skip
        command = [sys.executable, __file__, "--job", json.dumps(job), "--out", file.name]
        try:
            code = subprocess.run(command, timeout=arguments.time_limit).returncode
            failure = f"the process ended with code {code}"
        except subprocess.TimeoutExpired:
            failure = f"not finished after {arguments.time_limit} s"
        try:
            return json.loads(pathlib.Path(file.name).read_text())
        except json.JSONDecodeError:
            return [
                {"model": size, "atoms": n_atoms, "mode": mode, "error": failure} for mode in modes
            ]


def print_table(records):
    columns = "{:>5} {:>7} {:>14} {:>10} {:>7} {:>8} {:>13} {:>13} {:>12}"
    head = (
        "model",
        "atoms",
        "mode",
        "ms",
        "ratio",
        "GiB",
        "|dE|, eV/atom",
        "max|dF|, eV/Å",
        "rms F, eV/Å",
    )
    print(columns.format(*head))
    for record in records:
        if "error" in record:
            print(
                columns.format(*[record[key] for key in ("model", "atoms", "mode")], *["-"] * 6),
                record["error"],
            )
            continue
        numbers = [
            (record.get(key), form)
            for key, form in [
                ("ms", ".1f"), ("ratio", ".2f"), ("memory_gib", ".2f"),
                ("energy_error", ".1e"), ("force_error", ".1e"), ("force_rms", ".1e"),
            ]
        ]  # fmt: skip
        values = ["-" if value is None else format(value, form) for value, form in numbers]
        print(columns.format(*[record[key] for key in ("model", "atoms", "mode")], *values))


def main(arguments):
    warnings.filterwarnings("ignore")
    if arguments.job:
        records = measure(**json.loads(arguments.job))
        pathlib.Path(arguments.out).write_text(json.dumps(records))
        return

    from metatomic_tc.files import result_path
    from metatomic_tc.modes import supported_modes, usable_device
    from pet_models import SIZES

    try:
        supported = supported_modes(usable_device(arguments.device))
    except RuntimeError as error:
        sys.exit(str(error))
    modes = arguments.modes.split(",") if arguments.modes else supported
    for name, valid in [
        (mode.removesuffix("/stock").removesuffix("/whole"), supported) for mode in modes
    ] + [(size, SIZES) for size in arguments.sizes.split(",")]:
        if name not in valid:
            sys.exit(f"found '{name}', but here the choices are: {', '.join(valid)}")
    stock = STOCK if arguments.device.startswith("cuda") else STOCK[:1]
    gpu, versions = hardware(arguments.device)
    out = result_path("md_step", gpu, arguments.out)

    jobs = [(stock + modes, 0)]
    if arguments.compiled:
        # last, since it takes long; stock-fp32 runs again only to compare with
        jobs.append((STOCK[:1] + COMPILED[: len(stock)], 1))
    records = []
    for job, repeated in jobs:
        for size in arguments.sizes.split(","):
            for n_atoms in map(int, arguments.atoms.split(",")):
                new = measure_in_subprocess(size, n_atoms, job, arguments)[repeated:]
                records += [record | {"gpu": gpu, "versions": versions} for record in new]
                out.write_text(json.dumps(records, indent=1) + "\n")
    records.sort(key=lambda record: (record["model"], record["atoms"]))
    out.write_text(json.dumps(records, indent=1) + "\n")
    print_table(records)
    print(f"written to {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu (default cuda)")
    parser.add_argument("--sizes", default="s", help="sizes of PET: xs, s, m, l (default s)")
    parser.add_argument(
        "--atoms", default="192,5184,17280", help="numbers of atoms, multiples of 192"
    )
    parser.add_argument(
        "--modes",
        help="modes of metatomic-tc, as MODE, MODE/whole or MODE/stock (default: all that the "
        "device supports)",
    )
    parser.add_argument(
        "--compiled", action="store_true", help="also time stock PET under torch.compile"
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of every mode (default 7)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    parser.add_argument(
        "--time-limit", type=float, default=900, help="seconds for one process (default 900)"
    )
    parser.add_argument(
        "--out",
        default=RESULTS,
        help="file (.json) or directory (default results/md_step-<gpu>-<date>.json)",
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)
    main(parser.parse_args())
