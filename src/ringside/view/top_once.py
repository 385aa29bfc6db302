"""`ringside top --once`: the run as it is now, as a table or as JSON: for scripts, and for dumb terminals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec

from ringside.monitor.run_directory import finite
from ringside.view.top_rows import Order, Sparks, arrange, fit_columns, heading, row
from ringside.view.top_source import Snapshot
from ringside.view.top_words import first_line, verdict_block

SCHEMA = 1


def once_lines(snapshot: Snapshot, order: Order, width: int) -> Iterator[str]:
    """Yield the lines of `--once`: what runs, the verdicts, then one line per rank; no colours, no control characters.

    Args:
        snapshot: The run.
        order: Which ranks, in which order.
        width: Cells of a line at most.
    """
    yield first_line(snapshot, width).plain.rstrip()
    yield from (line.rstrip() for line in verdict_block(snapshot, width, 24).plain.split("\n"))
    columns = fit_columns(snapshot, width)
    yield ""
    yield heading(columns, order).rstrip()
    sparks = Sparks(snapshot.steps, snapshot.own_seconds, columns.spark)
    for one in arrange(snapshot.ranks, order):
        yield row(one, columns, sparks.line(one.rank)).rstrip()


def as_json(snapshot: Snapshot, order: Order) -> dict[str, Any]:
    """Return a run as plain data: what is not known is null, times are seconds."""
    content: dict[str, Any] = finite({
        "schema": SCHEMA,
        "where": snapshot.where,
        "name": snapshot.info.name if snapshot.info else "",
        "stage": snapshot.stage,
        "step": snapshot.step,
        "of": snapshot.of,
        "trouble": snapshot.trouble,
        "verdicts": [
            {**msgspec.to_builtins(one.verdict), "cost_rank_seconds": one.cost_rank_seconds, "over": one.over}
            for one in snapshot.verdicts
        ],
        "notes": list(snapshot.notes),
        "ranks": [dataclasses.asdict(one) for one in arrange(snapshot.ranks, order)],
    })  # fmt: skip
    return content
