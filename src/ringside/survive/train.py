"""The door for users: a training loop in which every step is a transaction.

::

    with ringside.survive.training(model, optimizer, dataset, loss_fn=loss_fn, batch_size=64, steps=1000) as t:
        for step in t:
            print(step.number, step.loss)

The body of the loop sees committed steps. What used to be in it (forward, backward, the optimizer's step) is done
between two of them, and again by others where a rank dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.data import default_collate

from ringside.errors import FinalStateError, MismatchError, RingsideError, StoreGoneError
from ringside.survive.audit import committed
from ringside.survive.cluster.failpoints import Failpoints
from ringside.survive.cluster.peers import own_place
from ringside.survive.cluster.rendezvous import Rendezvous
from ringside.survive.connection import StoreConnection, check_fingerprint, connect, fingerprint, is_again
from ringside.survive.data.micro_batches import Collate, DataSet, Loss, StepWork
from ringside.survive.data.rebalance import Mode, Rebalance, Stragglers
from ringside.survive.data.samples import Position, Samples, drawn_by, for_all_ranks, length_of, shuffled
from ringside.survive.driver import Driver
from ringside.survive.job import Afterwards, GoneRegisters, Step, SurviveJob
from ringside.survive.protocol.decision import Commit
from ringside.survive.protocol.settings import ProtocolSettings
from ringside.survive.state.checkpoint import Checkpoints
from ringside.survive.state.final import Final
from ringside.survive.state.kept import Kept
from ringside.survive.state.state import JobState
from ringside.survive.supervisor import REFUSED

_ELDERS_S = 10.0
"""How long a rank that has joined waits for others to begin an epoch, seconds; they are at the same step."""
_LOOK_S = 0.005

_log = logging.getLogger(__name__)


class Training:
    """A job's steps, one after the other.

    Args:
        driver: Trains them.
        samples: Which samples belong to which step.

    Attributes:
        rank: This rank.
        samples: Which samples belong to which step.
    """

    def __init__(self, driver: Driver | Afterwards, samples: Samples) -> None:
        self._driver = driver
        self.rank = driver.job.rank
        self.samples = samples

    def __iter__(self) -> Iterator[Step]:
        """Yield every step once it is committed and applied here; a rank that joins begins where the others are."""
        while (step := self._driver.next_step()) is not None:
            yield step

    @property
    def step(self) -> int:
        """The next step; all before it are in the parameters, each once."""
        return self._driver.job.state.step

    @property
    def joined(self) -> bool:
        """Whether this process came while the others trained: it has died, or is new."""
        return self._driver.joined

    def committed(self, steps: int) -> list[Commit]:
        """Return the decisions that count for the steps before `steps`, one a step: who computed which samples.

        Steps that were done again, because all ranks died after a checkpoint, count as they were done last. Those that
        this process has applied have the digest of their result.
        """
        job = self._driver.job
        known = self._driver.digests
        return [decision for _, decision in committed(job.rendezvous.registers, steps, job.settings, known)]

    @property
    def reason(self) -> str:
        """Why the job ended before its last step; "": it did not, or this rank ended it."""
        return self._driver.reason

    @property
    def rebalances(self) -> list[tuple[Rebalance, float | None]]:
        """What this rank, as the leader, has changed in the quotas, each with the gain that was measured."""
        return self._driver.job.stragglers.done

    def digest(self) -> int:
        """Return 64 bits over parameters, optimizer and step, equal on all ranks between the same two steps."""
        return self._driver.job.state.digest()


@contextlib.contextmanager
def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: DataSet,
    *,
    loss_fn: Loss,
    batch_size: int,
    micro_batches: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    sampler: Iterable[int] | None = None,
    scheduler: Any = None,
    collate_fn: Collate = default_collate,
    mean: bool = True,
    reproducible: bool = True,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int = 100,
    least_ranks: int = 1,
    on_straggler: Mode = "alert",
    silent_s: float = 60.0,
) -> Iterator[Training]:
    """Train so that every sample counts exactly once, whoever dies.

    Args:
        model: The model, on the host, not wrapped; made alike on all ranks (seed before).
        optimizer: Its optimizer; it is stepped once per committed step.
        dataset: A map-style data set, the same on all ranks.
        loss_fn: `loss_fn(model, batch)` returns the sum of the losses of a batch's samples, a scalar.
        batch_size: Samples per step over all ranks.
        micro_batches: Parts that a step is cut into, what ranks take over from each other; default: 4 per rank, or
            as many as there are samples.
        steps: How many steps; None: without end.
        seed: What order and random numbers are keyed by.
        sampler: Draws an epoch for all ranks (of a DistributedSampler its order is taken); default: a shuffle. It must
            be a function of the epoch and of seeds: its generator is seeded anew for every epoch, and ranks compare
            the order of every epoch before they train on it.
        scheduler: A learning rate scheduler, stepped after every step; its state moves along.
        collate_fn: Makes a batch of samples.
        mean: Gradients are divided by the number of samples; False: they stay sums.
        reproducible: Sums are made in the order of micro-batches, so that no bit depends on who computed what. It
            takes memory for a gradient per micro-batch.
        checkpoint_dir: Where checkpoints go, seen by all ranks; training resumes from the newest, with any number of
            ranks, but with the same batch, seed, length of the data set and order of samples only. None: none.
        checkpoint_every: Steps between checkpoints.
        least_ranks: With fewer ranks left, training stops.
        on_straggler: What to do about a rank that takes longer: `alert` tells, `rebalance` gives it fewer micro-batches
            (the gradient stays the same sum), `drain` goes on without one that takes three times as long.
        silent_s: A rank that lives and does not take part for so long is left behind, seconds.

    What comes after the loop sees the final state, on every rank that comes there. A process that is killed in it is
    started again and begins it again. A rank that leaves the loop before the last step ends the job for all, with its
    state, when it leaves the `with`. One that runs other code, or another model,
    than the first, or is there already (two jobs with one name), is refused: its process ends with status 77. One that
    cannot reach the job's store any more ends with status 75, one that cannot have the final state with 76.

    Raises:
        UsageError: Something cannot be as asked.
        MismatchError: The newest checkpoint is another model's, or of a job with other samples; the line says what
            differs.
        RingsideError: Training cannot go on; the line says why and what to do.
    """
    samples = samples_of(dataset, batch_size, micro_batches, seed, sampler)
    number = _ended[own_job()]
    kept = Kept.of_environment(os.environ)
    for _ in range(number):  # a part for each time that this process has trained to the end
        kept = kept and kept.behind()
    final = Final(kept, checkpoint_dir)
    with _connection(final, number) as connection:
        own = fingerprint(model, optimizer, dataset, samples, seed)
        state = JobState(model, optimizer, scheduler, Position(own, samples))
        if not final.is_over:
            # The first worker writes down what it is; one that differs leaves with a status of its own.
            standing = connection.registers.create("passport", msgspec.json.encode(own))
            try:
                check_fingerprint(own, standing, f"rank {connection.rank}")
            except MismatchError as error:
                raise _refused(str(error)) from None
        job = SurviveJob(
            rank=connection.rank,
            rendezvous=Rendezvous(connection.registers, connection.ranks),
            listening=Rendezvous(connection.listening, connection.ranks),
            settings=ProtocolSettings(
                micro_batches=samples.micro_batches,
                samples=samples.stretch,
                steps=steps,
                mean=mean,
                checkpoint_every=0 if checkpoint_dir is None else checkpoint_every,
                least_members=least_ranks,
                ranks=connection.ranks,
                patience_s=10.0,
            ),
            state=state,
            work=StepWork(model, loss_fn, dataset, samples, seed, collate_fn),
            checkpoints=_resumed(state, checkpoint_dir, final),
            final=final,
            per_micro_batch=reproducible,
            silent_s=silent_s,
            failpoints=Failpoints.of_environment(connection.rank, os.environ),
            stragglers=Stragglers(on_straggler),
            open_transport=None if connection.store is None else connection.open_transport,
        )
        try:
            trainer = Afterwards(job) if final.is_over else Driver(job)
        except MismatchError as error:  # another process is this rank of the job
            raise _refused(str(error)) from None
        with contextlib.closing(trainer) as driver:
            agree_on_orders(samples, connection, sampler, driver.has_elders)
            try:
                yield Training(driver, samples)
                driver.end_job()
            finally:
                samples.agree = None  # it knows the driver, which knows the samples: memory is not to wait for that
                _ended[own_job()] += driver.is_over


def samples_of(
    dataset: DataSet, batch: int, micro_batches: int | None, seed: int, sampler: Iterable[int] | None
) -> Samples:
    """Return which samples belong to which step: as a sampler draws them, or shuffled."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parts = max(min(4 * ranks, batch), 1) if micro_batches is None else micro_batches
    if sampler is None:
        size = length_of(dataset)
        return Samples(size, batch, parts, shuffled(size, seed))
    drawn = for_all_ranks(sampler)
    return Samples(length_of(drawn), batch, parts, drawn_by(drawn, seed))  # type: ignore[arg-type]


_ended: Counter[tuple[int, int, str]] = Counter()
"""How often a job was trained to its end in this process; another `training` is another job, with names of its own."""


def own_job() -> tuple[int, int, str]:
    """Return what this process is a worker of: also a forked one, or one whose environment was changed, begins anew."""
    names = ("RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    kept = Kept.of_environment(os.environ)
    return os.getpid(), kept.number if kept else 0, repr([os.environ.get(name) for name in names])


@contextlib.contextmanager
def _connection(final: Final, number: int) -> Iterator[StoreConnection]:
    """Give the job's registers; leave the program where they cannot be reached, or any more."""
    try:
        connection = connect(os.environ, number)
    except RingsideError as error:
        if not is_again(os.environ):
            raise
        if not final.is_over:
            _log.error("the job's store is gone: %s", error)
            raise SystemExit(StoreGoneError.exit_status) from None
        gone = GoneRegisters(f"the job is over, and its store is gone: {error}")
        connection = StoreConnection(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), gone, gone)
    try:
        yield connection
    except (StoreGoneError, FinalStateError) as error:
        _log.error("rank %d ends: %s", connection.rank, error)
        raise SystemExit(error.exit_status) from None
    except SystemExit as left:
        if left.code == REFUSED:  # so that nobody waits for this rank at the end
            Rendezvous(connection.registers, connection.ranks).refuse(connection.rank, own_place())
        raise
    finally:
        connection.close()


def _resumed(state: JobState, directory: str | Path | None, final: Final) -> Checkpoints | None:
    """Return where checkpoints go; the state is that of the newest one there, or what this rank kept at the end.

    Raises:
        FinalStateError: The job is over, and what was kept of its final state cannot be used.
    """
    checkpoints = None if directory is None else Checkpoints(Path(directory))
    kept = final.tree()
    if final.is_over and kept is None:
        raise FinalStateError("the job is over, and the final state that this rank kept cannot be read")
    saved = None if final.is_over or checkpoints is None else checkpoints.newest()
    if kept is not None and (saved is None or kept["step"] > saved["step"]):
        state.load(kept)
    elif saved is not None:
        state.resume(saved)
    return checkpoints


def agree_on_orders(
    samples: Samples, connection: StoreConnection, sampler: Iterable[int] | None, has_elders: Callable[[], bool]
) -> None:
    """Have this rank leave the program if it has another order of an epoch than the first that began the epoch.

    One that has joined does not begin an epoch before those that were there: theirs is the order to be compared with.

    Args:
        samples: This rank's.
        connection: To the job's registers.
        sampler: What draws; None: a shuffle does.
        has_elders: Tells whether this rank has joined others, and one that began the job is still with it.
    """
    drawn = "the data set" if sampler is None else f"its {type(sampler).__name__}"

    def agree(epoch: int, digest: str) -> None:
        registers, until = connection.registers, time.monotonic() + _ELDERS_S
        while registers.read(f"order/{epoch}") is None and has_elders() and time.monotonic() < until:
            time.sleep(_LOOK_S)  # a store has nothing to wait on for an order that may never come
        standing = registers.create(f"order/{epoch}", digest.encode()).decode(errors="replace")
        if standing != digest:
            raise _refused(
                f"rank {connection.rank} is refused, {drawn} has another order in epoch {epoch} than in the rest of "
                f"the job (digest {digest} here, {standing} there): an order must be a function of the epoch and of "
                "seeds, alike on all ranks and in every process"
            )

    samples.agree = agree


def _refused(why: str) -> SystemExit:
    """Say why a process is no member of this job, in one line; return what ends it."""
    _log.error("%s", why)
    return SystemExit(REFUSED)
