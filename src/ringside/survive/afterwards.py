"""A worker that is started after its job was over: it has the final state, and nothing is left but its last lines."""

from __future__ import annotations

from ringside.errors import StoreGoneError
from ringside.survive.job import Job


class Afterwards:
    """Stands in for a driver where an earlier worker of this rank has kept the final state that all agreed on.

    It takes nobody else to go on from there, nor the store: the others may have ended long ago.

    Args:
        job: What was trained; its state is the final one.

    Attributes:
        joined, reason, is_over, digests: As of a driver.
    """

    joined = True
    reason = ""
    is_over = True
    digests = None

    def __init__(self, job: Job) -> None:
        self.job = job

    def next_step(self) -> None:
        """Return that there is none."""

    def end_job(self) -> None:
        """It has ended."""

    def has_elders(self) -> bool:
        """Return False: there is nobody to wait for."""
        return False

    def close(self) -> None:
        """There is nothing to let go of."""


class GoneRegisters:
    """Registers of a store that is gone: who wants to know what was committed hears why that cannot be.

    Args:
        why: What is wrong with the store.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def create(self, key: str, value: bytes) -> bytes:
        """Return the value: nobody else is there who could have been first."""
        return value

    def read(self, key: str) -> bytes | None:
        """Raise `StoreGoneError`."""
        raise StoreGoneError(self._why)

    def swap(self, key: str, expected: bytes | None, new: bytes) -> bytes | None:
        """Raise `StoreGoneError`."""
        raise StoreGoneError(self._why)


__all__ = ["Afterwards", "GoneRegisters"]
