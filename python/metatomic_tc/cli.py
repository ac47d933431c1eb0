"""The ``metatomic-tc`` command."""

import argparse
import sys
import warnings

from . import __version__, doctor, export, info
from .model_files import ModelFileError
from .modes import DEFAULT_MODE, check_mode

EXTENSIONS = "directory with the TorchScript extensions of the model, if it has any"


def main(arguments: list[str] | None = None) -> int:
    """
    Run the command.

    :param arguments: the command line without the program, by default that of the process
    :return: exit code: 0 success, 1 failure, 2 wrong usage or a wrong file
    """
    parsed = _parser().parse_args(arguments)
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
        help="fp32, tf32, tf32x3, fp16x3, bf16x6, bf16x9 or bf16x9-eager (default: %(default)s); "
        "see `metatomic-tc info` for the modes of your GPU",
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
        help="keep these outputs only, e.g. energy: PET evaluates all it has, asked for or not "
        "(checkpoints and upet names only)",
    )
    command.add_argument(
        "--version", dest="model_version", metavar="X.Y.Z", help="version of a upet model"
    )

    command = commands.add_parser(
        "info",
        help="show versions, GPUs and the dispatch table, or what is in a model",
        description="Without a model: versions, devices with the modes they support, and the "
        "table that decides what computes a layer. With a model: its outputs, units, cutoffs, "
        "elements and linear layers.",
    )
    command.set_defaults(run=info.run)
    command.add_argument("model", nargs="?", metavar="MODEL.pt", help="an exported model")
    command.add_argument(
        "--mode",
        type=_mode,
        help="mode to show for its layers (default: the one in the file, or tf32x3)",
    )
    command.add_argument("--extensions", metavar="DIR", help=EXTENSIONS)

    command = commands.add_parser(
        "doctor",
        help="check the installation: PyTorch, LAMMPS, the plugin, MPI, GPUs",
        description="Check that everything fits together, and say what to do where it does not. "
        "Exit code 1 if there is a problem.",
    )
    command.set_defaults(run=lambda arguments: doctor.doctor())
    return parser


def _mode(name: str) -> str:
    try:
        check_mode(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name
