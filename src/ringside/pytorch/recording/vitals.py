"""Adds to a rank's records what the kernel and its GPU's driver report; dropped with a warning should that fail."""

from __future__ import annotations

import contextlib

import msgspec
import torch

from ringside.isolation import Guard
from ringside.monitor.run.records import StepRecord, Vitals
from ringside.monitor.vitals.gpu import open_gpu
from ringside.monitor.vitals.process import VitalSigns


class RankVitals:
    """The vitals of this process. All but `step_ended` is called by one thread, which is not the one that trains.

    Args:
        signs: Reads them.
    """

    def __init__(self, signs: VitalSigns | None = None) -> None:
        self._signs = signs or VitalSigns()
        self._guard = Guard(warning="what the kernel knows of this rank is not recorded any more")
        self._gpu: str | None = None
        self._is_gpu_known = not torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]

    def step_ended(self) -> None:
        """Called by the thread that trains: only there it can be seen which GPU it uses."""
        if self._is_gpu_known or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        self._is_gpu_known = True
        with contextlib.suppress(RuntimeError, AssertionError):
            uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
            self._gpu = None if uuid is None else str(uuid)

    def add_to(self, records: list[StepRecord]) -> list[StepRecord]:
        """Return a batch of records, ascending, with the vitals of the time since the last batch in the oldest.

        So a reader that goes step by step knows them for the steps that they are about.
        """
        vitals = self._guard.run(self._read) if records else None
        return records if vitals is None else [msgspec.structs.replace(records[0], vitals=vitals), *records[1:]]

    def skip(self) -> None:
        """Leave out the time since the last batch: what happened in it is no part of the run."""
        self._guard.run(self._signs.restart)

    def close(self) -> None:
        """Close the kernel's files and the driver."""
        self._signs.close()

    def _read(self) -> Vitals | None:
        if self._gpu is not None:  # here, not on the training thread: to load the driver's library takes long
            self._signs.gpu, self._gpu = open_gpu(self._gpu), None
        return self._signs.since()
