"""A torchrun that has run already: it puts a recorded run where its ranks would, says what they said, and ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ringside.processes import Death

RUNS = Path(__file__).parents[1] / "golden" / "runs"


class Recorded:
    """Stands for `ringside.launch.torchrun.Launch` where a command makes one.

    Args:
        run: Which of tests/golden/runs its ranks record; empty: none.
        said: What they write.
        status: torchrun's exit status.
        deaths: Of ranks.
        looks: How often a command looks before torchrun has ended; each time the next line is written.

    Attributes:
        arguments, environ: What torchrun was given.
        ended: The signals with which it was to be ended.
    """

    def __init__(
        self, run: str = "", lines: Sequence[str | Callable[[], str]] = (), status: int = 0,
        deaths: Sequence[Death] = (), looks: int = 0,
    ) -> None:  # fmt: skip
        self._run, self._said, self._status, self._looks = run, list(lines), status, max(looks, len(lines))
        self.deaths, self.arguments, self.environ, self.ended = list(deaths), [], {}, []

    def instead_of(self, module: Any, monkeypatch: pytest.MonkeyPatch) -> Recorded:
        """Be what a command's module starts."""
        monkeypatch.setattr(module, "Launch", self.start)
        return self

    def start(
        self, arguments: Sequence[str], environ: Mapping[str, str], sink: Callable[[str], None] | None = None
    ) -> Recorded:
        self.arguments, self.environ, self._sink = list(arguments), dict(environ), sink
        if self._run:
            shutil.copytree(RUNS / self._run, environ["RINGSIDE_RUN_DIR"], dirs_exist_ok=True)
            Path(environ["RINGSIDE_RUN_DIR"], "summary.json").unlink(missing_ok=True)
        return self

    def wait(self, timeout_s: float) -> int | None:
        self._looks -= 1
        if self._looks < 0:
            return self._status
        if self._said and self._sink is not None:
            line = self._said.pop(0)
            self._sink(line if isinstance(line, str) else line())
        return None

    def end(self, signum: int, hurry: Callable[[], bool] = lambda: False) -> bool:
        self.ended.append(signum)
        self._looks = 0
        return True
