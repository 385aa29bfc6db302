"""What the state machine of a member is told once: the job's shape, its patience, and the rules it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ringside.errors import UsageError
from ringside.survive.quotas import even_quotas

Quotas = Callable[[Sequence[int], int], Sequence[int]]
"""Ranks, ascending, and the number of micro-batches → how many each takes."""
Stretch = Callable[[int], tuple[int, int]]
"""Step → position of its first sample in the job's sequence of samples, and how many."""


def evenly(ranks: Sequence[int], micro_batches: int) -> Sequence[int]:
    """Return equal quotas, the first ranks taking what does not divide."""
    return even_quotas(len(ranks), micro_batches)


@dataclass(frozen=True)
class Rules:
    """The rules that exactly-once rests on. All are kept; the proof breaks them one by one, to see that it notices.

    Args:
        every_ack: COMMIT is written only after every member acknowledged a private copy.
        equal_digests: COMMIT is written, and applied, only for equal digests.
        tagged_acks: An acknowledgement counts only for the attempt that it names.
        abort_first: A later generation runs a step only after ABORT stands for the earlier one.
        take_commit: Where COMMIT stands for the earlier one, its result is taken.
        keep_copy: Nothing is discarded before a decision stands.
        read_first: Nobody applies without having read COMMIT.
        epochs: A process that comes back is not the one that went, though it has the same rank.
        verify_state: State that was fetched counts only with the digest that was offered.
        fence: An incarnation is given up only after ABORT was won in all its open generations.
        committed_only: Only committed steps get into a checkpoint.
        keep_final: The final state is kept where it outlives its process before that is acknowledged.
        all_come: The job is over only when every rank that can come has the final state.
        final_only: Whoever has not got the final state does not come to what a script does after its last step.
    """

    every_ack: bool = True
    equal_digests: bool = True
    tagged_acks: bool = True
    abort_first: bool = True
    take_commit: bool = True
    keep_copy: bool = True
    read_first: bool = True
    epochs: bool = True
    verify_state: bool = True
    fence: bool = True
    committed_only: bool = True
    keep_final: bool = True
    all_come: bool = True
    final_only: bool = True


@dataclass(frozen=True)
class Settings:
    """A job's shape and patience; equal on all members.

    Args:
        micro_batches: Parts that every step is cut into.
        samples: Which samples a step takes.
        steps: How many steps there are; None: without end.
        mean: The divisor is the number of samples; False: 1, the gradient is a sum.
        quotas: Shares micro-batches out when the membership changes.
        checkpoint_every: A checkpoint whenever so many steps are committed; 0: none.
        least_members: With fewer the job halts.
        ranks: How many ranks the job was started with: at its end all are waited for; 0: only the members are.
        most_attempts: How often one step may be begun.
        retry_s: Whatever was not answered is asked again after so long, seconds.
        patience_s: How long a member with a private copy waits for the others before it suspects them, seconds.
        fetch_patience_s: The same in a generation's first step while somebody fetches state, seconds.
        end_patience_s: How long a rank is waited for at the end of which nobody knows whether it comes, seconds.
        store_patience_s: How long registers may not answer before the job halts, seconds.
        rules: What is kept.

    Raises:
        UsageError: A number is out of range.
    """

    micro_batches: int
    samples: Stretch
    steps: int | None = None
    mean: bool = True
    quotas: Quotas = evenly
    checkpoint_every: int = 0
    least_members: int = 1
    ranks: int = 0
    most_attempts: int = 32
    retry_s: float = 0.05
    patience_s: float = 2.0
    fetch_patience_s: float = 60.0
    end_patience_s: float = 300.0
    store_patience_s: float = 30.0
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        if min(self.micro_batches, self.least_members, self.most_attempts) < 1:
            raise UsageError("micro_batches, least_members and most_attempts are at least 1")
        if not 0 < self.retry_s <= self.patience_s <= min(self.fetch_patience_s, self.store_patience_s):
            raise UsageError("patience must grow: 0 < retry_s <= patience_s <= fetch_patience_s and store_patience_s")


__all__ = ["Quotas", "Rules", "Settings", "Stretch", "evenly"]
