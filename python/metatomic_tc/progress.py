"""What long commands print while they work."""

import sys
import time


class Steps:
    """
    Numbered steps with the time that each took, on stderr, so that stdout holds results only::

        [1/3] Reading model.ckpt ... 2.1 s
    """

    def __init__(self, total: int):
        self._total = total
        self._number = 0

    def __call__(self, text: str) -> "_Step":
        self._number += 1
        return _Step(f"[{self._number}/{self._total}] {text} ... ")


class _Step:
    def __init__(self, text: str):
        self._text = text

    def __enter__(self) -> None:
        self._start = time.monotonic()
        print(self._text, end="", file=sys.stderr, flush=True)

    def __exit__(self, kind, error, traceback) -> None:
        if error is None:
            print(f"{time.monotonic() - self._start:.1f} s", file=sys.stderr, flush=True)
        else:
            print("failed", file=sys.stderr, flush=True)
