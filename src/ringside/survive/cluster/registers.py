"""Registers that a job's processes agree through: written once, or compared and set.

A value is never empty. Every call may be repeated: one that was answered too late may have had its effect, and asking
again then returns what stands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from ringside.engine.runtime.worker import Worker
from ringside.errors import StoreGoneError, UsageError

NOBODY_WRITES = b"\x00ringside: nobody writes this"
"""Compared with and set to itself, so a store tells what stands without waiting for it and without writing."""


class Registers(Protocol):
    """Named values that change atomically."""

    def create(self, key: str, value: bytes) -> bytes:
        """Write `value` where nothing stands; return what stands then, the first value ever written."""

    def read(self, key: str) -> bytes | None:
        """Return what stands; None: nothing."""

    def swap(self, key: str, expected: bytes | None, new: bytes) -> bytes | None:
        """Write `new` where `expected` stands (None: nothing); return what stands then.

        Returns:
            `new` if it was written, now or before; another value if that stands; None if `expected` was a value and
            nothing stands.
        """


class MemoryRegisters:
    """Registers of the threads of one process, and of simulated ones.

    Attributes:
        values: What stands, by key.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._guard = threading.Lock()

    def create(self, key: str, value: bytes) -> bytes:
        """See `Registers`."""
        with self._guard:
            return self.values.setdefault(key, _worth_writing(value))

    def read(self, key: str) -> bytes | None:
        """See `Registers`."""
        with self._guard:
            return self.values.get(key)

    def swap(self, key: str, expected: bytes | None, new: bytes) -> bytes | None:
        """See `Registers`."""
        with self._guard:
            if self.values.get(key) == expected:
                self.values[key] = _worth_writing(new)
            return self.values.get(key)


class StoreRegisters:
    """Registers in a c10d store (TCPStore, FileStore, HashStore, PrefixStore), by its `compare_set`.

    A store lives in one process; where that is stopped, its clients wait in a system call. So the calls are made on a
    thread, one after the other, and the caller waits no longer than told.

    Args:
        store: The store; give a job's registers a `PrefixStore` of their own.
        timeout_s: How long one call may take, seconds.
    """

    def __init__(self, store: Any, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._calls = Worker("ringside-survive-registers")

    def create(self, key: str, value: bytes) -> bytes:
        """See `Registers`; raise `StoreGoneError` if the store does not answer, or has gone."""
        # c10d: an empty expectation means that nothing stands.
        return self._ask(key, lambda: self._store.compare_set(key, b"", _worth_writing(value)))

    def read(self, key: str) -> bytes | None:
        """See `Registers`; errors as in `create`."""
        stands = self._ask(key, lambda: self._store.compare_set(key, NOBODY_WRITES, NOBODY_WRITES))
        return None if stands == NOBODY_WRITES else stands

    def swap(self, key: str, expected: bytes | None, new: bytes) -> bytes | None:
        """See `Registers`; errors as in `create`."""
        if expected is None:
            return self.create(key, new)
        if expected == new:
            return self.read(key)
        # c10d answers with the expectation where nothing stands; where it stood, `new` stands now.
        stands = self._ask(key, lambda: self._store.compare_set(key, expected, _worth_writing(new)))
        return None if stands == expected else stands

    def close(self) -> None:
        """End the thread; one that is held up by the store is left behind after a second."""
        self._calls.stop(timeout_s=1.0)

    def _ask(self, key: str, call: Callable[[], bytes]) -> bytes:
        try:
            work = self._calls.submit(call)
            work.wait(self._timeout_s)
            return bytes(work.result())
        except TimeoutError:
            raise StoreGoneError(
                f"the store did not answer within {self._timeout_s:g} s when asked for {key!r}: see whether the host "
                "that it lives on is alive"
            ) from None
        except RuntimeError as error:  # torch's DistStoreError and DistNetworkError
            raise StoreGoneError(f"the store cannot be asked for {key!r} any more: {error}") from error


def _worth_writing(value: bytes) -> bytes:
    if not value or value == NOBODY_WRITES:
        raise UsageError("a register needs at least one byte: to a store an empty value means that it is not set")
    return value
