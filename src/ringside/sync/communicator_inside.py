"""All-reduces of a communicator whose ranks all share memory: the host's own, by the algorithm that was asked for."""

from __future__ import annotations

from typing import Any

from ringside.engine import Communicator as HostCommunicator
from ringside.engine.algorithm import NATIVE, Choice, refuse_other_orders
from ringside.engine.buffers import flatten
from ringside.errors import UnsupportedError
from ringside.schedule import Schedule
from ringside.sync.communicator_device import OnDevice, on_device
from ringside.sync.communicator_options import Options

_PATHS = ("one_shot", "direct")  # inside a host these are ways of their own, not programs


class Inside:
    """Gives all-reduces to the host's communicator; there is nothing between hosts that a choice could be about.

    Args:
        local: The host's communicator.
        options: What the communicator was asked for.
        device: Reduces tensors on GPUs; None: nothing does.
    """

    def __init__(self, local: HostCommunicator, options: Options, device: OnDevice | None) -> None:
        self._local, self._options, self._device = local, options, device

    def all_reduce(
        self, x: Any, op: str = "sum", async_op: bool = False, *, algorithm: str | Schedule | None = None, **how: Any
    ) -> Any:
        """All-reduce as `Communicator.all_reduce`; a schedule of one's own may be given, too."""
        try:
            way = algorithm if isinstance(algorithm, Schedule) else self._way(algorithm, x)
            return self._local.all_reduce(x, op, async_op, algorithm=way, **how)
        except UnsupportedError:
            if self._device is None or not on_device(x):
                raise
            return self._device.all_reduce(x, op, async_op, algorithm=algorithm, **how)

    def _way(self, algorithm: str | None, x: Any) -> str | Schedule | None:
        choice = Choice.parse(algorithm) if algorithm else self._options.choice
        if choice is None or choice.over != "ranks" or choice.algorithm == NATIVE:
            return None
        if self._options.reproducible:
            refuse_other_orders(choice, self._local.size, flatten(x).dtype)
        return choice.algorithm if choice.algorithm in _PATHS else choice.schedule(self._local.size)
