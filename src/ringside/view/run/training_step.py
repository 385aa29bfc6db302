"""A recorded run as the step that `ringside.predict.what_if` changes: its own times, what it synchronised and how."""

from __future__ import annotations

import itertools

import numpy as np

from ringside.doctor.kineto.straggler import LEAST_STEPS
from ringside.doctor.ringside_run import whole_steps
from ringside.errors import UsageError
from ringside.monitor.stats import known_median
from ringside.predict import Topology, preset
from ringside.predict.what_if import PredictedStep
from ringside.view.run.recorded import Run

LATENCY_BYTES = 8.0  # a size at which a collective takes its latency and nothing else


def recorded_step(run: Run, topology: Topology | None = None) -> PredictedStep:
    """Return the steps of a run: those that all ranks recorded, without the warm-up of long runs.

    Args:
        run: Of two ranks or more.
        topology: What joined its ranks; None: hosts and ranks as the run's, joined as the slowest presets are.

    Raises:
        UsageError: It is too short, of one rank, synchronised nothing, or had another number of ranks.
    """
    if topology is None:
        sizes = host_sizes(run)
        one_host = len(sizes) == 1
        topology = preset("loopback", 1, run.ranks) if one_host else preset("ethernet-10g").sized(len(sizes), sizes)
    if topology.ranks != run.ranks:
        raise UsageError(f"{run.info.name} has {run.ranks} ranks, and {topology.name} {topology.ranks}: give --hosts")
    if run.ranks < 2 or not len(run.table):
        raise UsageError(f"{run.info.name} has no step of several ranks: there is nobody to wait for")
    table, whole = whole_steps(run.table)
    if whole.sum() < LEAST_STEPS:
        raise UsageError(f"{run.info.name}: all ranks recorded {whole.sum()} steps, {LEAST_STEPS} are needed")
    names = ("payload_bytes", "collectives", "busy_seconds", "wire_seconds", "latency_seconds")
    # Of what was recorded: 0 is nothing.
    figure = {name: known_median(np.where(table[name] > 0, table[name], np.nan)) for name in names}
    if not figure["payload_bytes"]:
        raise UsageError(f"{run.info.name} recorded no gradient bytes: nothing was synchronised")
    # What collectives of a size take: the run's buckets, and an empty one where that is known.
    count = max(round(figure["collectives"]), 1)
    bucket = figure["payload_bytes"] / count
    bucket_s = (figure["busy_seconds"] or figure["wire_seconds"]) / count
    measured: list[tuple[float, float]] = []
    if bucket_s > 0 and bucket > LATENCY_BYTES:
        if 0 < figure["latency_seconds"] < bucket_s:
            measured.append((LATENCY_BYTES, figure["latency_seconds"]))
        measured.append((bucket, bucket_s))
    return PredictedStep(
        topology=topology,
        size_bytes=figure["payload_bytes"],
        own_s=table["own_seconds"][whole],
        buckets=count,
        exposed_s=table["exposed_seconds"][whole].min(axis=1),
        measured=tuple(measured),
    )


def host_sizes(run: Run) -> list[int]:
    """Return how many ranks each of a run's hosts has, in rank order; one host where they are not known."""
    return [len(list(group)) for _, group in itertools.groupby(run.info.hosts)] or [run.ranks]
