"""Where selection tables are kept between runs: one readable JSON file per kind of job."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ringside.engine.network import Network
from ringside.engine.selection_table import Table
from ringside.errors import UsageError

_log = logging.getLogger(__name__)

SAME_RATE, SAME_LATENCY = 1.5, 4.0
"""A kept table holds while no link's rate, nor the median latency, differs by more than these factors."""


@dataclass(frozen=True)
class Mode:
    """What RINGSIDE_SELECTION asks for.

    Args:
        measure: Whether anything is measured at all.
        read: Whether a kept table may be used.
        path: The file; None: the cache directory's.
    """

    measure: bool = True
    read: bool = True
    path: Path | None = None

    @staticmethod
    def of_environment(environ: Mapping[str, str]) -> Mode:
        """Return what RINGSIDE_SELECTION says: nothing, `off`, `fresh`, or the path of a table."""
        text = environ.get("RINGSIDE_SELECTION", "")
        if text in ("", "off", "fresh"):
            return Mode(measure=text != "off", read=text == "")
        return Mode(path=Path(text).expanduser())


def cache_path(key: Mapping[str, str], environ: Mapping[str, str]) -> Path:
    """Return the file for tables that depend on `key`: in RINGSIDE_CACHE_DIR, else in XDG_CACHE_HOME/ringside."""
    home = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = environ.get("RINGSIDE_CACHE_DIR") or os.path.join(home, "ringside")
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
    return Path(folder) / f"selection-{digest}.json"


def load(path: Path, key: Mapping[str, str], network: Network) -> Table | None:
    """Return the table in a file, if it is one, is of this kind of job, and the links are as they were."""
    try:
        table = Table.decode(path.read_bytes())
        if table.key != dict(key):
            raise UsageError("it is of another job")
        if not alike(Network.from_topology(table.topology), network):
            raise UsageError("the links are other ones now")
    except FileNotFoundError:
        return None
    except (OSError, UsageError) as error:
        _log.info("the selection table %s is not used: %s", path, error)
        return None
    return table


def store(path: Path, table: Table) -> None:
    """Write a table so that a reader sees the old one or the new one whole; a disk that refuses is only logged."""
    scratch = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(table.encode())
        os.replace(scratch, path)
    except OSError as error:
        _log.warning("the selection table is not kept: %s", error)
        if scratch:
            with contextlib.suppress(OSError):
                os.unlink(scratch)


def alike(a: Network, b: Network) -> bool:
    """Tell whether the links of two networks are the same, as far as probing can tell."""
    if a.size != b.size:
        return False
    off = ~np.eye(a.size, dtype=np.bool_)
    rates = a.seconds_per_byte[off], b.seconds_per_byte[off]
    latencies = np.median(a.latency_s[off]), np.median(b.latency_s[off])
    return bool(
        (np.maximum(*rates) <= SAME_RATE * np.minimum(*rates)).all() and max(latencies) <= SAME_LATENCY * min(latencies)
    )
