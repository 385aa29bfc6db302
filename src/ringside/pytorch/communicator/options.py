"""A communicator's options: by arguments, else by environment; and which of them must be equal on all ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ringside._version import __version__
from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.net.exchange.compression import WireCompression
from ringside.engine.settings import Settings
from ringside.errors import UsageError


class Options:
    """The options of a communicator; a sub-group has its parent's."""

    def __init__(
        self, settings: Settings, algorithm: str | None, wire_dtype: str | None, reproducible: bool, switch: bool
    ) -> None:
        self.settings = settings
        self.choice = AlgorithmSpec.parse(algorithm) if algorithm else None
        self.wire = WireCompression(wire_dtype) if wire_dtype else None  # type: ignore[arg-type]
        self.reproducible, self.switch = reproducible, switch
        self.selection = os.environ.get("RINGSIDE_SELECTION") or "measured"
        if reproducible and self.wire is not None:
            raise UsageError(
                "wire_dtype rounds what travels, so results would depend on who is where: not reproducible"
            )

    @staticmethod
    def or_problem(*how: Any) -> tuple[Options, str]:
        """Return the options, or what is wrong with them: the other ranks wait to hear of that."""
        try:
            return Options.of_environment(os.environ, *how), ""
        except UsageError as error:
            return Options(Settings(), None, None, False, False), str(error)

    @staticmethod
    def of_environment(
        environ: Mapping[str, str],
        timeout: float | timedelta | None,
        algorithm: str | None,
        wire_dtype: str | None,
        reproducible: bool | None,
        switch: bool,
    ) -> Options:
        """Return what was given explicitly, else by environment."""
        if reproducible is None:
            reproducible = environ.get("RINGSIDE_REPRODUCIBLE", "") not in ("", "0")
        return Options(
            Settings.of_environment(environ, timeout=timeout),
            algorithm or environ.get("RINGSIDE_ALGORITHM"),
            wire_dtype or environ.get("RINGSIDE_WIRE_DTYPE"),
            reproducible,
            switch,
        )

    def without_switch(self) -> Options:
        """Return these for a sub-group, which the reducer does not know."""
        child = copy.copy(self)
        child.switch = False
        return child

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
