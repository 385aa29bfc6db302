"""Where selection tables are kept between runs: one readable JSON file per kind of job."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ringside.engine.cost.network import CostNetwork
from ringside.engine.tuner.table import TimingTable
from ringside.errors import UsageError
from ringside.files import replace_file

_log = logging.getLogger(__name__)

SAME_RATE, SAME_LATENCY = 2.0, 5.0
"""A kept table holds while the medians of the links' rates and latencies differ by no more than these factors."""
SLOW, PLAINLY_NOT_SLOW = 0.5, 0.65  # of the median rate: a link between the two counts as either


@dataclass(frozen=True)
class Mode:
    """The mode that RINGSIDE_SELECTION sets.

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
        """Return what RINGSIDE_SELECTION says: `measured` (or nothing), `off`, `fresh`, or the path of a table."""
        text = environ.get("RINGSIDE_SELECTION", "") or "measured"
        if text in ("measured", "off", "fresh"):
            return Mode(measure=text != "off", read=text == "measured")
        return Mode(path=Path(text).expanduser())


def cache_path(key: Mapping[str, str], environ: Mapping[str, str]) -> Path:
    """Return the file for tables that depend on `key`: in RINGSIDE_CACHE_DIR, else in XDG_CACHE_HOME/ringside."""
    home = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = environ.get("RINGSIDE_CACHE_DIR") or os.path.join(home, "ringside")
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
    return Path(folder) / f"selection-{digest}.json"


def load_table(
    path: Path, key: Mapping[str, str], network: CostNetwork, *, level: int = logging.INFO
) -> TimingTable | None:
    """Return the table in a file, if it is one, is of this kind of job, and the links are as they were.

    Args:
        path: The file.
        key: Of this job.
        network: The links as they are now.
        level: Of the log record that says why a file that is there is not used.
    """
    try:
        table = TimingTable.decode(path.read_bytes())
        if table.key != dict(key):
            name = min(name for name in {*table.key, *key} if table.key.get(name) != key.get(name))
            was, now = (side.get(name, "not known") for side in (table.key, key))
            raise UsageError(f"it is of another job: {name} was {was!r} and is {now!r}")
        if not are_alike(CostNetwork.from_topology(table.topology), network):
            raise UsageError("the links are other ones now")
    except FileNotFoundError:
        return None
    except (OSError, UsageError) as error:
        _log.log(level, "the selection table %s is not used: %s", path, error)
        return None
    return table


def store_table(path: Path, table: TimingTable) -> None:
    """Write a table so that a reader sees the old one or the new one whole; a disk that refuses is only logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, table.encode())
    except OSError as error:
        _log.warning("the selection table is not kept: %s", error)


def are_alike(a: CostNetwork, b: CostNetwork) -> bool:
    """Return whether the links of two networks are of the same kind: as fast in the middle, and the same ones slow.

    A probe of a busy machine is off by tens of per cent, for single links by more; what the ranking of choices hangs on
    is which links are slow beside the others, and roughly how rate and latency compare.
    """
    if a.size != b.size:
        return False
    off = ~np.eye(a.size, dtype=np.bool_)
    rates = [1.0 / np.maximum(network.seconds_per_byte[off], 1e-30) for network in (a, b)]
    medians = [float(np.median(rate)) for rate in rates]
    latencies = [float(np.median(network.latency_s[off])) for network in (a, b)]
    # A link that is slow in one and plainly not in the other.
    first, second = (rate / middle for rate, middle in zip(rates, medians, strict=True))
    others = ((first < SLOW) & (second > PLAINLY_NOT_SLOW)) | ((second < SLOW) & (first > PLAINLY_NOT_SLOW))
    near = max(medians) <= SAME_RATE * min(medians) and max(latencies) <= SAME_LATENCY * min(latencies)
    return bool(near and not others.any())
