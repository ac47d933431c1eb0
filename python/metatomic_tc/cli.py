"""The ``metatomic-tc`` command."""

import argparse
import math
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

from . import __version__, doctor, export, info
from .bench import gemm
from .bench.cases import DIRECTIONS
from .bench.pet_layers import LINEAR_LAYERS
from .model_files import ModelFileError
from .modes import DEFAULT_MODE, check_mode, supported_modes
from .validate import driver
from .validate.settings import TESTS

EXTENSIONS = "directory with the TorchScript extensions of the model, if it has any"


def main(arguments: list[str] | None = None) -> int:
    """
    Run the command.

    :param arguments: the command line without the program, by default that of the process
    :return: exit code: 0 success, 1 failure, 2 wrong usage or a wrong file
    """
    parsed = _parser().parse_args(arguments)
    parsed.command_line = sys.argv[1:] if arguments is None else arguments
    warnings.simplefilter("ignore")
    try:
        return parsed.run(parsed)
    except KeyboardInterrupt:
        print("\nmetatomic-tc: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `metatomic-tc info | head`; Python would complain again when it closes stdout.
        sys.stderr.close()
        return 0
    except Exception as error:
        if parsed.traceback:
            raise
        message = str(error) or type(error).__name__
        print(f"metatomic-tc: error: {message}", file=sys.stderr)
        return 2 if isinstance(error, ModelFileError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="metatomic-tc",
        description="Metatomic models, above all PET, on Tensor Cores with FP32-level accuracy.",
    )
    parser.add_argument("--version", action="version", version=f"metatomic-tc {__version__}")
    parser.add_argument(
        "--traceback", action="store_true", help="show where in the code an error came from"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser(
        "export",
        help="write a model whose linear layers use a mode",
        description="Write a metatomic model (.pt) whose linear layers use a mode. It runs in "
        "LAMMPS, ASE and every other metatomic engine.",
        epilog="example: metatomic-tc export pet.ckpt -o pet.pt --outputs energy",
    )
    command.set_defaults(run=export.run)
    command.add_argument(
        "source",
        metavar="CHECKPOINT_OR_MODEL",
        help="a metatrain checkpoint (.ckpt), an exported metatomic model (.pt), or the name of a "
        "upet model (pet-mad-s, pet-mad-s@1.6.0; needs the network)",
    )
    command.add_argument(
        "-o", "--output", metavar="OUT.pt", help="file to write (default: named after the source)"
    )
    command.add_argument(
        "--mode",
        type=_mode,
        default=DEFAULT_MODE,
        help=f"one of {', '.join(supported_modes())} (default: %(default)s); see `metatomic-tc "
        "info` for the modes of your GPU",
    )
    command.add_argument(
        "--extensions",
        metavar="DIR",
        help="collect the operator library in this directory, for engines in processes that do not "
        "import metatomic_tc",
    )
    command.add_argument(
        "--outputs",
        metavar="NAME[,NAME...]",
        help="keep these outputs only, e.g. energy; the stock backend evaluates all it has, asked "
        "for or not (checkpoints and upet names only)",
    )
    command.add_argument(
        "--backend",
        choices=["tc", "stock"],
        help="what evaluates PET: tc, without padding and with fused kernels, or stock, that of "
        "metatrain (default: tc where it can do what the model needs)",
    )
    command.add_argument(
        "--layers",
        metavar="PATTERN",
        default="*",
        help="shell-style pattern for the paths of the linear layers that use the mode, with ! in "
        "front: for those of all others (default: '*', all; they are listed by `metatomic-tc info "
        "MODEL.pt --layers '*'`). LAMMPS goes by the keyword layers of its pair style instead",
    )
    command.add_argument(
        "--version", dest="model_version", metavar="X.Y.Z", help="version of a upet model"
    )

    command = commands.add_parser(
        "info",
        help="show versions, GPUs and the tables of kernels, or what is in a model",
        description="Without a model: versions, devices with the modes they support, and the "
        "table that decides what computes a layer. With a model: its outputs, units, cutoffs, "
        "elements and linear layers.",
    )
    command.set_defaults(run=info.run)
    command.add_argument("model", nargs="?", metavar="MODEL.pt", help="an exported model")
    command.add_argument(
        "--mode",
        type=_mode,
        help=f"mode to show for its layers (default: the one in the file, or {DEFAULT_MODE})",
    )
    command.add_argument(
        "--layers",
        metavar="PATTERN",
        help="list every linear layer with its path, and what it computes in if the mode is for "
        "those that match the shell-style pattern (with ! in front: for all others)",
    )
    command.add_argument("--extensions", metavar="DIR", help=EXTENSIONS)

    command = commands.add_parser(
        "doctor",
        help="check the installation: PyTorch, LAMMPS, the plugin, MPI, GPUs",
        description="Check that everything fits together, and say what to do where it does not. "
        "Exit code 1 if there is a problem.",
    )
    command.set_defaults(run=lambda arguments: doctor.doctor())

    command = commands.add_parser(
        "bench",
        help="measure the speed and accuracy of this installation on its hardware",
        description="Measure the speed and accuracy of this installation on its hardware.",
    )
    benchmarks = command.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    command = benchmarks.add_parser(
        "gemm",
        help="the matrix products of PET's linear layers",
        description="Time every matrix product of PET's linear layers in every mode, beside "
        "cuBLAS in FP32 and TF32, CUTLASS's 3xTF32 and Triton's tf32x3, and compare the results "
        "with FP64. Prints tables and writes the records to gemm-<gpu>-<date>.json, with a "
        "roofline plot beside it. Ctrl-C keeps what is done.",
        epilog="example: metatomic-tc bench gemm --sizes s --atoms 17280 --modes tf32x3",
    )
    command.set_defaults(run=gemm.run)
    command.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu (default: cuda)")
    command.add_argument(
        "--sizes",
        type=_list_of(_choice(list(LINEAR_LAYERS))),
        default=list(LINEAR_LAYERS),
        metavar="SIZE[,SIZE...]",
        help="sizes of PET (default: xs,s,m,l)",
    )
    command.add_argument(
        "--atoms",
        type=_list_of(_positive),
        default=[192, 5184, 17280],
        metavar="N[,N...]",
        help="numbers of atoms of water (default: 192,5184,17280)",
    )
    command.add_argument(
        "--modes",
        type=_list_of(_mode),
        metavar="MODE[,MODE...]",
        help="modes of metatomic-tc (default: all that the device supports); fp32 and tf32 are "
        "always measured",
    )
    command.add_argument(
        "--directions",
        type=_list_of(_choice(DIRECTIONS)),
        default=DIRECTIONS,
        metavar="DIRECTION[,DIRECTION]",
        help="forward, input_gradient (default: both)",
    )
    command.add_argument(
        "--shapes",
        type=_list_of(_shape),
        metavar="MxNxK[,MxNxK...]",
        help="products to measure instead of PET's, e.g. 17280x1024x4096",
    )
    command.add_argument(
        "--rounds",
        type=_positive,
        default=7,
        metavar="N",
        help="turns of every implementation, whose median counts (default: %(default)s)",
    )
    command.add_argument(
        "--output",
        metavar="DIR_OR_FILE",
        help="directory, or file named .json (default: the current directory)",
    )
    command.add_argument("--no-plot", action="store_true", help="write no roofline plot")
    _add_validate(commands)
    return parser


def _add_validate(commands) -> None:
    command = commands.add_parser(
        "validate",
        help="show whether a mode keeps the physics of a model",
        description="Compare modes with FP32 and FP64: errors of single points, smoothness along a "
        "curve, energy conservation in LAMMPS, relaxation, and speed. Writes report.html and "
        "report.json. Ctrl-C keeps what is done. Exit code 1 if a mode fails.",
        epilog="example: metatomic-tc validate pet.pt --modes tf32x3,bf16x9 -o report",
    )
    command.set_defaults(run=driver.run)
    command.add_argument("model", metavar="MODEL.pt", help="an exported model")
    command.add_argument(
        "--modes",
        type=_list_of(_mode),
        metavar="MODE[,MODE...]",
        help="modes (default: all that the device supports except tf32, which is no FP32-level "
        "mode); fp32 is always included",
    )
    command.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda if there is a GPU)")
    command.add_argument(
        "--tests",
        type=_list_of(_choice(TESTS)),
        metavar="TEST[,TEST...]",
        help=f"of: {', '.join(TESTS)} (default: all). A test named here must be possible",
    )
    command.add_argument(
        "-o",
        "--output",
        metavar="REPORT_DIR",
        default="validation",
        help="directory for the report (default: %(default)s)",
    )
    command.add_argument(
        "--resume", action="store_true", help="continue the report that is in this directory"
    )
    command.add_argument(
        "--quick", action="store_true", help="smaller experiments: minutes; what changes is printed"
    )
    command.add_argument("--extensions", metavar="DIR", help=EXTENSIONS)
    command.add_argument(
        "--jobs",
        type=_positive,
        metavar="N",
        help="runs of LAMMPS, and on a GPU relaxations in ASE, at the same time (default: as many "
        "as modes on a GPU, 2 on a CPU)",
    )
    group = command.add_argument_group("structures and sizes, in the place of the demo model's")
    group.add_argument(
        "--structures", nargs="+", metavar="FILE", help="single point: files that ASE can read"
    )
    group.add_argument("--pull", metavar="FILE", help="smoothness: the structure")
    group.add_argument(
        "--pull-atoms",
        type=_list_of(_index),
        metavar="I[,I...]",
        help="indices, from 0, of the atoms that move (default: C and O, else the last atom)",
    )
    group.add_argument(
        "--pull-direction",
        type=_numbers(3),
        metavar="X,Y,Z",
        help="where they move to (default: 0,0,1); write --pull-direction=-1,0,0 for negative ones",
    )
    group.add_argument(
        "--pull-range",
        type=_numbers(2),
        metavar="FROM,TO",
        help="height of the first of them above the highest of the others, Å (default: 1.2,6.0)",
    )
    group.add_argument("--pull-points", type=_positive, metavar="N", help="default: 60")
    group.add_argument("--nve", metavar="FILE", help="energy conservation: an equilibrated start")
    group.add_argument(
        "--picoseconds", type=_positive_number, metavar="T", help="its length (default: 30)"
    )
    group.add_argument("--relax", metavar="FILE", help="relaxation: the structure")
    group.add_argument(
        "--fmax", type=_positive_number, metavar="F", help="its goal in eV/Å (default: 0.001)"
    )
    group.add_argument(
        "--atoms",
        type=_list_of(_positive),
        metavar="N[,N...]",
        help="speed: numbers of atoms of water (default: 192,5184,17280)",
    )


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], list]:
    def parse_list(text: str) -> list:
        return [parse(part.strip()) for part in text.split(",")]

    return parse_list


def _choice(choices: list[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(
                f"found '{text}', but the choices are: {', '.join(choices)}"
            )
        return text

    return parse


def _positive(text: str) -> int:
    if not re.fullmatch("[0-9]+", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"found '{text}', but expected a positive number")
    return int(text)


def _index(text: str) -> int:
    if not re.fullmatch("[0-9]+", text):
        raise argparse.ArgumentTypeError(f"found '{text}', but expected an index from 0")
    return int(text)


def _positive_number(text: str) -> float:
    (number,) = _numbers(1)(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"found '{text}', but expected a positive number")
    return number


def _numbers(count: int) -> Callable[[str], tuple[float, ...]]:
    def parse(text: str) -> tuple[float, ...]:
        try:
            numbers = tuple(map(float, text.split(",")))
        except ValueError:
            numbers = ()
        if len(numbers) != count or not all(map(math.isfinite, numbers)):
            raise argparse.ArgumentTypeError(f"found '{text}', but expected {count} number(s)")
        return numbers

    return parse


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch("[0-9]+x[0-9]+x[0-9]+", text) or 0 in map(int, text.split("x")):
        raise argparse.ArgumentTypeError(
            f"found '{text}', but expected three positive numbers as in 17280x1024x4096"
        )
    return tuple(map(int, text.split("x")))


def _mode(name: str) -> str:
    try:
        check_mode(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name
