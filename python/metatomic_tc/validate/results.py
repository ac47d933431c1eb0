"""The results of a validation, kept in ``report.json`` while it runs."""

import json
import sys
from pathlib import Path

from ..files import write_atomically
from ..model_files import ModelFileError, first_line

#: What must be the same for results to be continued
IDENTITY = ["format", "model_sha256", "device", "gpu", "settings"]


class Results:
    """
    Results by test, mode and structure, and the sentences about what could not be computed.

    :param path: the file
    :param head: what the report says besides, with all keys of :data:`IDENTITY`
    :param resume: continue what is in the file, if it is there
    :raises ModelFileError: if the file is there without ``resume``, or is of something else
    """

    def __init__(self, path: Path, head: dict, resume: bool):
        self._path = path
        self.data = head | {"results": {}, "problems": []}
        if path.exists() and not resume:
            raise ModelFileError(
                f"'{path.parent}' has a report already; give --resume to continue it, or another "
                "directory."
            )
        if resume and not path.exists():
            print(f"There is no report in '{path.parent}' yet: starting one.", file=sys.stderr)
        if path.exists():
            try:
                old = json.loads(path.read_text())
                results = old["results"]
            except (ValueError, KeyError, TypeError) as error:
                raise ModelFileError(
                    f"'{path}' cannot be continued: it is not a report of validate ({error}); "
                    "give another directory, or leave --resume out."
                ) from error
            for key in IDENTITY:
                if old.get(key) != head[key]:
                    raise ModelFileError(
                        f"'{path}' cannot be continued with another {key.replace('_', ' ')}: it "
                        f"was {_difference(old.get(key), head[key])}; give another directory, or "
                        "leave --resume out."
                    )
            self.data["results"] = results

    def get(self, test: str, mode: str, structure: str) -> dict | None:
        return self.data["results"].get(test, {}).get(mode, {}).get(structure)

    def put(self, test: str, mode: str, structure: str, result: dict) -> None:
        """Add a result, and write everything."""
        self.data["results"].setdefault(test, {}).setdefault(mode, {})[structure] = result
        self.write()

    def of(self, test: str, mode: str) -> dict[str, dict]:
        """All results of a test in a mode, by structure."""
        return self.data["results"].get(test, {}).get(mode, {})

    def problem(self, test: str, mode: str | None, structure: str, error: Exception | str) -> None:
        """Note what could not be computed: for one mode, or (None) for all alike."""
        message = str(error).strip() or type(error).__name__
        if isinstance(error, Exception) and not isinstance(error, (ModelFileError, OSError)):
            lines = message.splitlines()
            # The cause comes last in errors of TorchScript.
            message = lines[-1] if "TorchScript" in message else first_line(message)
        entry = {"test": test, "mode": mode, "structure": structure, "message": message[:600]}
        if entry not in self.data["problems"]:
            self.data["problems"].append(entry)
            print(f"  {structure}: {entry['message']}", file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        """Write the file; an older one is replaced as a whole."""
        write_atomically(self._path, json.dumps(self.data, indent=1, allow_nan=False) + "\n")


def _difference(old, new) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [key for key in new if old.get(key) != new[key]]
        return ", ".join(f"{key} = {old.get(key)} and is now {new[key]}" for key in keys)
    return f"{old} and is now {new}"
