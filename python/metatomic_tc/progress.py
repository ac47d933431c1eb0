"""What long commands print while they work: on stderr, so that stdout holds results only."""

import contextlib
import sys
import time
from collections.abc import Iterator


class Steps:
    """
    Numbered steps with the time that each took::

        [1/3] Reading model.ckpt ... 2.1 s

    :param total: number of steps
    :param costs: of each, in any unit, to say how long the rest will take
    :param interleaved: other lines are printed during the steps, so that the end of a step has a
        line of its own
    """

    def __init__(self, total: int, costs: list[float] | None = None, interleaved: bool = False):
        self._total, self._costs, self._interleaved = total, costs, interleaved
        self._number = 0
        self._start = time.monotonic()

    @contextlib.contextmanager
    def __call__(self, text: str) -> Iterator[None]:
        self._number += 1
        number = f"[{self._number}/{self._total}] "
        start = time.monotonic()
        _print(f"{number}{text} ...", "\n" if self._interleaved else " ")
        before_end = f"{number}done in " if self._interleaved else ""
        try:
            yield
        except BaseException:
            _print(f"{number}failed" if self._interleaved else "failed")
            raise
        left = ""
        if self._costs is not None:
            left = _time_left(self._start, sum(self._costs[: self._number]) / sum(self._costs))
        _print(f"{before_end}{time.monotonic() - start:.1f} s{left}")


class Bar:
    """
    A bar on stderr that fills up; on a terminal in one line, elsewhere a line for each quarter.

    :param text: what is counted
    :param total: how many there will be
    """

    def __init__(self, text: str, total: float):
        self._text, self._total = text, total
        self._start, self._shown = time.monotonic(), -1.0
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: float) -> None:
        part = min(1.0, done / self._total)
        step = 0.01 if self._terminal else 0.25
        if part < 1.0 and part < self._shown + step:
            return
        if part == self._shown:
            return
        self._shown = part
        left = _time_left(self._start, part)
        bar = "#" * round(20 * part)
        line = f"  {self._text} [{bar:<20}] {100 * part:3.0f} %{left}"
        end = "\n" if part == 1 or not self._terminal else ""
        start = "\r" if self._terminal else ""
        _print(f"{start}{line:<78}", end)


def _time_left(start: float, part: float) -> str:
    """What to say of the rest, when ``part`` of everything was done since ``start``."""
    seconds = time.monotonic() - start
    return f", about {seconds * (1 - part) / part:.0f} s left" if 0 < part < 1 else ""


def _print(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
