"""A recorded run as the step that `ringside.predict.what_if` changes: its own times, what it synchronised and how."""

from __future__ import annotations

import itertools
from dataclasses import replace
from statistics import median

import numpy as np

from ringside.doctor.kineto.straggler import LEAST_STEPS
from ringside.doctor.ringside_run import whole_steps
from ringside.errors import UsageError
from ringside.monitor.run.directory import RunReader
from ringside.monitor.run.records import carried
from ringside.monitor.stats import known_median
from ringside.predict import Topology, preset
from ringside.predict.plan.options import AUTO, names
from ringside.predict.what_if import WIRE_BYTES, PredictedStep, as_measured, bucket_seconds
from ringside.view.run.recorded import Run

LATENCY_BYTES = 8.0  # a size at which a collective takes its latency and nothing else


def recorded_step(run: Run, topology: Topology | None = None, algorithm: str = AUTO) -> PredictedStep:
    """Return the steps of a run: those that all ranks recorded, without the warm-up of long runs.

    Args:
        run: Of two ranks or more.
        topology: What joined its ranks; None: hosts and ranks as the run's, with the rate of its links as the kernel
            counted it; joined as the slowest presets are where it did not, or on one host.
        algorithm: What reduced its gradients, a name of `options.names`; `auto`: as on such a topology.

    Raises:
        UsageError: It is too short, of one rank, synchronised nothing, or had another number of ranks.
    """
    sizes, ran = host_sizes(run), carried(RunReader(run.path).poll_events())
    unseen: list[str] = []
    has_own_links = topology is None and len(sizes) > 1 and link_rate(run) > 0
    if topology is None:
        one_host = len(sizes) == 1
        topology = preset("loopback", 1, run.ranks) if one_host else preset("ethernet-10g").sized(len(sizes), sizes)
    wire_dtype = ran.wire_dtype if ran is not None and ran.wire_dtype in WIRE_BYTES else "float32"
    if has_own_links and topology.between is not None:
        # Of a tensor more bytes than of what it travels as.
        rate = link_rate(run) * WIRE_BYTES["float32"] / WIRE_BYTES[wire_dtype]
        topology = replace(topology, name=run.info.name, between=replace(topology.between, bytes_per_s=rate))
    if topology.ranks != run.ranks:
        raise UsageError(f"{run.info.name} has {run.ranks} ranks, and {topology.name} {topology.ranks}: give --hosts")
    if run.ranks < 2 or not len(run.table):
        raise UsageError(f"{run.info.name} has no step of several ranks: there is nobody to wait for")
    table, whole = whole_steps(run.table)
    if whole.sum() < LEAST_STEPS:
        raise UsageError(f"{run.info.name}: all ranks recorded {whole.sum()} steps, {LEAST_STEPS} are needed")
    fields = ("payload_bytes", "collectives", "busy_seconds", "wire_seconds", "latency_seconds")
    # Of what was recorded: 0 is nothing.
    figure = {name: known_median(np.where(table[name] > 0, table[name], np.nan)) for name in fields}
    if not figure["payload_bytes"]:
        raise UsageError(f"{run.info.name} recorded no gradient bytes: nothing was synchronised")

    # What collectives of a size take: the run's buckets, and an empty one where that is known.
    count = max(round(figure["collectives"]), 1)
    own, backward = table["own_seconds"][whole], table["backward_seconds"][whole]
    step = PredictedStep(
        topology=topology,
        size_bytes=figure["payload_bytes"],
        own_s=own,
        buckets=count,
        algorithm=algorithm,
        exposed_s=table["exposed_seconds"][whole].min(axis=1),
        backward_s=backward.clip(0.0, own) if (backward > 0).all() else None,
    )
    bucket_s = (figure["busy_seconds"] or figure["wire_seconds"]) / count
    if not bucket_s:
        unseen.append("what a bucket takes: it follows from what was left exposed")
    if not bucket_s or has_own_links:
        # Buckets between hosts travel two at a time, and the first is timed as no longer than the others.
        bucket_s = max(bucket_s, bucket_seconds(step))
    measured: list[tuple[float, float]] = []
    if bucket_s > 0 and step.bucket_bytes > LATENCY_BYTES:
        if 0 < figure["latency_seconds"] < bucket_s:
            measured.append((LATENCY_BYTES, figure["latency_seconds"]))
        measured.append((step.bucket_bytes, bucket_s))

    # Its own network: what links do not take of a bucket is the ranks'.
    has_own_links, share = has_own_links and bool(measured), 1.0
    if has_own_links:
        if algorithm == AUTO:
            went_by = "native" if run.info.engine != "ringside" else "" if ran is None else ran.algorithm
            algorithm, is_exact = _priced_as(went_by, topology)
            if not is_exact:
                said = f"what {went_by} takes" if went_by else "by which algorithm gradients went"
                unseen.append(f"{said}: priced as {algorithm} (--algorithm NAME: as another)")
        topology, share = as_measured(topology, algorithm, measured)
    return replace(
        step,
        topology=topology,
        algorithm=algorithm,
        measured=tuple(measured),
        wire_dtype=wire_dtype,
        has_own_links=has_own_links,
        link_share=share,
        unseen=tuple(unseen),
    )


def _priced_as(went_by: str, topology: Topology) -> tuple[str, bool]:
    """Return the predictor's name of what a run's gradients went by, and whether it is the same.

    Args:
        went_by: As `ringside.engine.algorithm.AlgorithmSpec` writes it; empty: not known.
        topology: Of the run.
    """
    over, _, name = went_by.rpartition("/")
    name = "ring" if name == "native" else name  # Gloo's own
    if topology.ranks > topology.hosts and (over or not went_by):
        return "hierarchical", name == "ring"
    return (name, True) if name in names(topology) else ("ring", False)


def link_rate(run: Run) -> float:
    """Return what a link between hosts carried while it was busy, bytes/s, the median over links; 0: not known."""
    rates = [link["bytes_per_s"] for link in run.summary.get("links") or ()]
    return median(rates) if rates else 0.0


def host_sizes(run: Run) -> list[int]:
    """Return how many ranks each of a run's hosts has, in rank order; one host where they are not known."""
    return [len(list(group)) for _, group in itertools.groupby(run.info.hosts)] or [run.ranks]
