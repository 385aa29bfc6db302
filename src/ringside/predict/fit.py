"""Hardware that is held to tables measured on it: one's own, or those of an installed package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ringside.errors import UsageError
from ringside.predict.laws.calibrate import Band, fit
from ringside.predict.laws.fabric import BASE, RATE
from ringside.predict.laws.knowledge import Knowledge
from ringside.predict.plan.options import has_library
from ringside.predict.plan.plan import CERTAIN
from ringside.predict.score import Score, hold_out, measured, other_scale
from ringside.predict.tables import aiconfigurator, read_tables
from ringside.predict.tables.checks import check_rows
from ringside.predict.tables.table import ALL_REDUCE, Table
from ringside.predict.topology.topology import MeasuredTimes, Topology


@dataclass(frozen=True)
class TableFit:
    """What a table showed of its hardware.

    Args:
        table: As it was checked.
        latency_s: What the smallest tensors take, fitted.
        algbw: Bytes per second that large tensors tend to, fitted.
        expected: (latency, algbw) of the hardware's law, before anything was measured.
        held_out: Every second row by the others; refused where there are too few.
        other_scales: The table by those of other scales alone; None where there are none.
    """

    table: Table
    latency_s: Band
    algbw: Band
    expected: tuple[float, float]
    held_out: Score
    other_scales: Score | None


def fit_tables(tables: Sequence[Table], known: Knowledge) -> list[TableFit]:
    """Return what each of checked tables shows; all have usable rows."""
    found = []
    for table in tables:
        law = known.law_or_vague(table)
        fitted = fit([row.size_bytes for row in table.rows], measured(table.rows), law)
        # What the rows moved the law's figures by, in the linear model, and how sure they are then.
        moved = law.mean + np.diag(law.spread**2) @ fitted.slopes.T @ fitted.pull
        spread = CERTAIN * np.sqrt(np.diag(fitted.posterior))
        latency, rate = (
            Band(*(float(np.exp(moved[figure] + sign * spread[figure])) for sign in (0, -1, 1)))
            for figure in (BASE, RATE)
        )
        expected = float(np.exp(law.mean[BASE])), float(np.exp(law.mean[RATE]))
        others = [other for other in tables if (other.ranks, other.hosts) != (table.ranks, table.hosts)]
        beside = other_scale(others, table, known) if others else None
        found.append(TableFit(table, latency, rate, expected, hold_out(table, known), beside))
    return found


def measured_topology(tables: Sequence[Table], known: Knowledge) -> Topology:
    """Return the hardware of checked tables with their rows in it.

    Raises:
        UsageError: A table's hardware is not known, no GPU library's laws apply to it, tables are of different
            hardware, or one has no usable row.
    """
    scales: list[Topology] = []
    for table in tables:
        scale = known.topology(table)
        if scale is None:
            raise UsageError(f"{table.name}: its text names no known hardware; give --preset NAME")
        if not has_library(scale):
            raise UsageError(
                f"{table.name}: {scale.name} is no hardware of a GPU library, and a fit moves only such a library's "
                "laws; measure the links of CPU hosts with `ringside probe -o FILE`"
            )
        if not table.rows:
            raise UsageError(f"{table.name}: no usable row")
        scales.append(scale)
    largest = max(scales, key=lambda scale: scale.ranks)
    alike = replace(largest, name="", ranks_per_host=(1,), nics=1)
    for table, scale in zip(tables, scales, strict=True):
        if replace(scale, name="", ranks_per_host=(1,), nics=1) != alike:
            raise UsageError(
                f"{table.name} is of {scale.name}, {tables[scales.index(largest)].name} of {largest.name} or another "
                "network: fit each hardware on its own, or give with --preset what all of them are"
            )
    measured = list(largest.measured)
    for table, scale in zip(tables, scales, strict=True):
        sizes = tuple(row.size_bytes for row in table.rows)
        times = tuple(float(f"{row.time_s:.9g}") for row in table.rows)
        words = table.collective, table.algorithm or "auto", Path(table.path).name
        measured.append(MeasuredTimes(scale.ranks_per_host, scale.nics, sizes, times, *words))
    return replace(largest, measured=tuple(measured))


# -------------------------------------------------------------------------------------------------
# A system that NVIDIA's aiconfigurator has measured: its tables are read where pip has put them.

INSTALL = "pip install 'torch-ringside[presets]' && pip install --no-deps aiconfigurator-core"
USED = (ALL_REDUCE, "all_gather", "reduce_scatter", "alltoall")


def installed_system(system: str, gpus: int, nccl: str = "") -> tuple[Topology, str]:
    """Return a system as installed tables have measured it, and in words which; a preset of ours where there are none.

    Args:
        system: `h200`, `gb200`, ...: the folder of the package, or its first word.
        gpus: How many in all.
        nccl: Version or its beginning, `2.29`; empty: the newest.

    Raises:
        UsageError: The system, or this version of it, is not known.
    """
    if gpus < 2:
        raise UsageError(f"--gpus {gpus}: one GPU has nobody to reduce with; give 2 or more")
    packages = aiconfigurator.installed()
    names = sorted({name for package in packages for name in package.measured})
    wanted = [name for name in names if name == system or name.startswith(f"{system}_")]
    files = [path for package in packages for name in wanted for path in package.files(name)]
    if files:
        tables = [table for path in files for table in read_tables(path) if table.dtype == "half"]
        chosen = _of_version(tables, nccl, system)
        topology = measured_topology(chosen, Knowledge())
        sized = Knowledge().topology(replace(chosen[0], ranks=gpus, hosts=0))
        assert sized is not None  # its words named the tables' hardware
        used = [package for package in packages if any(package.systems in Path(one.path).parents for one in chosen)]
        metas = sorted({Path(one.path).with_name("collection_meta.yaml") for one in chosen})
        marks = [re.search(r"Copyright \(c\) (\d{4})", meta.read_text()) for meta in metas if meta.is_file()]
        years = ", ".join(sorted({mark[1] for mark in marks if mark}))
        counts = ", ".join(map(str, sorted({table.ranks for table in chosen})))
        words = (
            f"measured by NVIDIA: {' and '.join(f'{each.name} {each.version}' for each in used)} (Apache-2.0), "
            f"{chosen[0].cluster}, {chosen[0].library}, half, {counts} GPUs; "
            f"{f'copyright {years}' if years else 'no date given'}"
        )
        return replace(sized, measured=topology.measured), words
    ours = Knowledge().topology(Table(system, (), ranks=gpus, cluster=system))
    if ours is None:
        raise UsageError(f"--system {system}: not known; {'one of ' + ', '.join(names) if packages else INSTALL}")
    why = f"no table of {system} is installed" if packages else f"for NVIDIA's own measurements: {INSTALL}"
    return ours, f"preset {ours.name}; {why}"


def _of_version(tables: Sequence[Table], nccl: str, system: str) -> list[Table]:
    """Return the tables of the newest version that begins so, one for every collective and number of GPUs."""
    versions = {table.library.removeprefix("NCCL ") for table in tables if table.collective == ALL_REDUCE}
    fitting = [each for each in versions if each == nccl or not nccl or each.startswith(f"{nccl}.")]
    if not versions:
        raise UsageError(f"--system {system}: its installed tables have no all-reduce of halves")
    if not fitting:
        raise UsageError(f"--nccl {nccl}: {system} was measured with {', '.join(sorted(versions))}")
    newest = max(fitting, key=lambda each: [int(part) for part in re.findall(r"\d+", each)])
    found: dict[tuple[str, int], Table] = {}
    # The folder of that very version before others that hold it too.
    for table in sorted(tables, key=lambda table: Path(table.path).parent.name != newest):
        if table.library.removeprefix("NCCL ") == newest and table.collective in USED:
            found.setdefault((table.collective, table.ranks), check_rows(table))
    return list(found.values())
