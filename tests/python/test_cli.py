"""The command line itself."""

import subprocess
import sys

import metatomic_tc
import pytest
from metatomic_tc.cli import main


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.strip() == f"metatomic-tc {metatomic_tc.__version__}"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "COMMAND"),
        (["exprot"], "exprot"),
        (["export"], "CHECKPOINT_OR_MODEL"),
        (["export", "model.pt", "--mode", "bf16x3"], "'bf16x3'"),
        (["info", "model.pt", "--mode", "TF32"], "'TF32'"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_wrong_modes_name_the_valid_ones(capsys):
    with pytest.raises(SystemExit):
        main(["export", "model.pt", "--mode", "bf16x3"])
    assert "tf32x3" in capsys.readouterr().err


def test_help_of_every_command(capsys):
    for command in ("export", "info", "doctor", "bench", "validate"):
        with pytest.raises(SystemExit) as exit:
            main([command, "--help"])
        assert exit.value.code == 0
        assert command in capsys.readouterr().out


def test_a_traceback_is_shown_only_when_asked_for(tmp_path, capsys):
    path = str(tmp_path / "no.pt")
    assert main(["info", path]) == 2
    error = capsys.readouterr().err
    assert error == f"metatomic-tc: error: there is no file '{path}'.\n"
    with pytest.raises(ValueError):
        main(["--traceback", "info", path])


def test_a_closed_pipe_is_no_error():
    code = "from metatomic_tc_entry_points import main; import sys; sys.exit(main())"
    done = subprocess.run(
        f"{sys.executable} -c '{code}' info | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "Versions\n"
    assert "Traceback" not in done.stderr and "Error" not in done.stderr
