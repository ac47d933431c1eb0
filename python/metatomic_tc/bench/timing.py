"""How long something takes, on a GPU by events and on a CPU by the clock."""

import time
from collections.abc import Callable

import torch

#: A turn launches something so often that it takes about this long, in seconds ...
TURN = 5e-3
#: ... but not more often than this: a queue of launches has an end.
MOST_LAUNCHES = 100
#: Cycles of a GPU in a second, at most about
CYCLES = 2e9


class Timer:
    """
    Times launches on a device.

    :param device: a CPU or CUDA device
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"

    def __call__(self, launch: Callable[[], None], launches: int, host_time: float = 0) -> float:
        """
        Seconds for one launch, the average of ``launches``.

        :param host_time: how long the host takes to launch them all, in seconds. The GPU waits that
            long, so that a short kernel is not measured as what it takes to launch it.
        """
        if not self._on_gpu:
            start = time.perf_counter()
            for _ in range(launches):
                launch()
            return (time.perf_counter() - start) / launches
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(CYCLES * (1.5 * host_time + 5e-5)))
        start.record()
        for _ in range(launches):
            launch()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / launches

    def plan(self, launch: Callable[[], None]) -> tuple[int, float]:
        """How often to launch in a turn, and how long the host takes to do so, in seconds."""
        if not self._on_gpu:
            return max(1, min(MOST_LAUNCHES, int(TURN / self(launch, 1)))), 0
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(3):
            launch()
        host_time = (time.perf_counter() - start) / 3
        torch.cuda.synchronize()
        launches = round(TURN / self(launch, 3, 3 * host_time))
        launches = max(1, min(MOST_LAUNCHES, launches))
        return launches, launches * host_time

    def copy_bandwidth(self, device: torch.device) -> float:
        """Bytes per second that a copy reads and writes."""
        source = torch.empty(2**30 if self._on_gpu else 2**26, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = lambda: target.copy_(source)  # noqa: E731
        copy()
        return 2 * source.numel() / min(self(copy, 3) for _ in range(3))
