"""A communicator's options: by arguments, else by environment; and which of them must be equal on all ranks."""

from __future__ import annotations

import os
from datetime import timedelta

from ringside._version import __version__
from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.net.exchange.wire import make_wire
from ringside.engine.settings import Settings
from ringside.errors import UsageError


class Options:
    """The options of a communicator: as they are given, else by environment; a sub-group has its parent's.

    Args:
        timeout, algorithm, wire_dtype, reproducible, switch: As of `ringside.communicator`; None: not given.

    Attributes:
        feeds_back: What is rounded away of gradients by `int8` and `fp8_e4m3` is added to the next step's; need not
            be equal on all ranks.
        problem: What is wrong with them; "": nothing is. The other ranks wait to hear of that.
    """

    def __init__(
        self,
        timeout: float | timedelta | None = None,
        algorithm: str | None = None,
        wire_dtype: str | None = None,
        reproducible: bool | None = None,
        switch: bool = False,
    ) -> None:
        environ = os.environ
        algorithm = algorithm or environ.get("RINGSIDE_ALGORITHM")
        wire_dtype = wire_dtype or environ.get("RINGSIDE_WIRE_DTYPE")
        if reproducible is None:
            reproducible = environ.get("RINGSIDE_REPRODUCIBLE", "") not in ("", "0")
        self.selection = environ.get("RINGSIDE_SELECTION") or "measured"
        self.feeds_back = environ.get("RINGSIDE_ERROR_FEEDBACK") != "0"
        self.problem = ""
        try:
            self.settings = Settings.of_environment(environ, timeout=timeout)
            self.choice = AlgorithmSpec.parse(algorithm) if algorithm else None
            # Reproducibly, every contribution is rounded, whoever adds it up.
            self.wire = make_wire(wire_dtype, rounds_own=reproducible) if wire_dtype else None
            self.reproducible, self.switch = reproducible, switch
        except UsageError as error:
            self.settings, self.choice, self.wire, self.problem = Settings(), None, None, str(error)
            self.reproducible = self.switch = False

    def agreed(self) -> dict[str, str]:
        """Return what must be equal on all ranks, by name: ranks compare it when they meet."""
        return {
            "version of ringside": __version__,
            "sizes of messages, segments and blocks": str(self.settings.agreed()),
            "algorithm (RINGSIDE_ALGORITHM)": str(self.choice or "by measurement"),
            "wire_dtype (RINGSIDE_WIRE_DTYPE)": self.wire.dtype if self.wire else "float32",
            "reproducible (RINGSIDE_REPRODUCIBLE)": str(self.reproducible),
            "switch": str(self.switch),
            "RINGSIDE_SELECTION": self.selection,
        }
