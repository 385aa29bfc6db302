"""Replicas that drift apart: every rank's digests of its parameters go in, verdicts come out. Pure.

In data parallelism all replicas hold the same parameters after every step, to the last bit. Nobody notices when they
do not: the loss goes on falling. So ranks compare digests now and then. Of three or more, those that differ from the
largest group that agrees are named; of two it is not known which is right.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

import msgspec

from ringside.errors import UsageError
from ringside.monitor.verdict import Evidence, Verdict, VerdictEvent
from ringside.text import name_ranks

ADVICE = (
    "What is trained from here on is wrong: stop, go back to a checkpoint from before step {since}, and look for what "
    "only some ranks did: an optimizer step skipped or taken twice, a checkpoint or a learning rate that not all got, "
    "parameters edited by hand, state outside DDP that steers them (buffers, a seed per rank). Where nothing is found, "
    "test the memory of {who}."
)

Lists = Callable[[int], Mapping[int, Sequence[int]]]
"""Gives, for a check's number, the digest of every parameter by rank: of the ranks that still have them."""


class Check(msgspec.Struct, frozen=True, array_like=True):
    """One rank's parameters at one moment.

    Args:
        number: Gradient synchronisations of the model so far: the same moment on all ranks.
        step: The training step that had just ended.
        digest: Of all parameters together, 64 bits.
        at_s: When, seconds on the rank's own monotonic clock.
    """

    number: int
    step: int
    digest: int
    at_s: float


class ReplicaCheck:
    """Compares the replicas of one model, and reports each disagreement once.

    Args:
        ranks: The ranks that hold one, ascending.
        names: The parameters' names, in the model's order.
        model: What the model is called.

    Attributes:
        ranks: The ranks whose checks are waited for.
        judged: Number of the newest check that was compared.
        open: The verdicts that are not over, by their ranks.
    """

    def __init__(self, ranks: Sequence[int], names: Sequence[str], model: str = "") -> None:
        self.ranks = tuple(ranks)
        self.judged = 0
        self.open: dict[tuple[int, ...], Verdict] = {}
        self._names, self._model = list(names), model
        self._agreed: Check | None = None
        self._since_s: float | None = None

    def judge(self, checks: Mapping[int, Sequence[Check]], lists: Lists) -> list[VerdictEvent]:
        """Compare every check that has come from all ranks since the last call, oldest first.

        Args:
            checks: Each rank's newest checks.
            lists: Called only where they differ.
        """
        by_number: dict[int, dict[int, Check]] = defaultdict(dict)
        for rank in self.ranks:
            for check in checks.get(rank, ()):
                by_number[check.number][rank] = check
        complete = [n for n in sorted(by_number) if n > self.judged and len(by_number[n]) == len(self.ranks)]
        events: list[VerdictEvent] = []
        for number in complete:
            self.judged = number
            own = by_number[number]
            first = own[self.ranks[0]]
            if len({check.digest for check in own.values()}) == 1:
                # All agree: what is open is over.
                lasted_s = first.at_s - self._since_s if self._since_s is not None else 0.0
                for verdict in self.open.values():
                    over = msgspec.structs.replace(
                        verdict,
                        cause=f"{verdict.cause}; they agree again after step {first.step}",
                        evidence={**verdict.evidence, "until_step": first.step},
                        cost_rank_seconds=lasted_s * len(self.ranks),
                    )
                    events.append(VerdictEvent(over, ended=True))
                self._agreed, self._since_s = first, None
                self.open.clear()
                continue
            if self._since_s is None:
                self._since_s = self._agreed.at_s if self._agreed is not None else first.at_s
            ranks, decided = find_odd_ranks({rank: check.digest for rank, check in own.items()})
            if ranks in self.open:
                continue
            # Ranks keep the lists of their newest checks only: a later one where all still have it does as well.
            later = (lists(n) for n in complete if n >= number)
            digests = next((found for found in later if len(found) == len(self.ranks)), {})
            self.open[ranks] = self._verdict(first, ranks, decided, digests)
            events.append(VerdictEvent(self.open[ranks], ended=False))
        return events

    def without(self, ranks: Sequence[int]) -> None:
        """Wait no longer for some ranks: they do not take part."""
        self.ranks = tuple(rank for rank in self.ranks if rank not in ranks)

    def _verdict(
        self, first: Check, ranks: tuple[int, ...], decided: bool, lists: Mapping[int, Sequence[int]]
    ) -> Verdict:
        since = 0 if self._agreed is None else self._agreed.step + 1
        # Places of the parameters that are not the same everywhere; unknown where ranks hold other parameters.
        differing = []
        if len({len(digests) for digests in lists.values()}) == 1:
            columns = enumerate(zip(*lists.values(), strict=True))
            differing = [place for place, column in columns if len(set(column)) > 1]
        evidence: Evidence = {"first_seen_step": first.step, "decided": int(decided)}
        if self._agreed is not None:
            evidence["last_agreed_step"] = self._agreed.step
        if self._model:
            evidence["model"] = self._model
        if differing:
            evidence["parameter"] = self._name(differing[0])
            evidence["parameters_differing"] = len(differing)
        evidence["parameters"] = len(self._names)
        started_s = self._since_s if self._since_s is not None else first.at_s
        return Verdict(
            kind="diverged",
            ranks=list(ranks),
            since_step=since,
            detected_step=first.step,
            excess_ratio=0.0,
            cause=self._cause(ranks, decided, differing, lists),
            evidence=evidence,
            # All that was trained since they last agreed has to be trained again.
            cost_rank_seconds=max(first.at_s - started_s, 0.0) * len(self.ranks),
            advice=ADVICE.format(since=since, who=name_ranks(ranks)),
        )

    def _cause(
        self, ranks: tuple[int, ...], decided: bool, differing: Sequence[int], lists: Mapping[int, Sequence[int]]
    ) -> str:
        """Return which parameters differ from whose, since when, and what such a pattern mostly comes from."""
        if not differing:
            same = len({len(digests) for digests in lists.values()}) <= 1
            which = "its parameters differ" if same else "it has other parameters, which differ"
        elif len(differing) == 1:
            which = f"parameter {self._name(differing[0])} differs"
        else:
            more = f"{len(differing) - 1} more of {len(self._names)}"
            which = f"parameter {self._name(differing[0])} and {more} differ"
        if decided:
            others = name_ranks(rank for rank in self.ranks if rank not in ranks)
            from_whom, tie = f"from those of {others}", ""
        elif len(self.ranks) == 2:
            from_whom, tie = "between the ranks", "; of two, either may be right"
        else:
            from_whom, tie = "between the ranks", "; no group of them is the largest, so none is right"
        agreed = self._agreed
        since = "they never agreed" if agreed is None else f"they still agreed after step {agreed.step}"
        if not differing:
            pattern = ""
        elif agreed is None:
            pattern = ": as with different initial values, or a checkpoint that only some ranks loaded"
        elif len(differing) == len(self._names) > 1:
            pattern = ": all at once, as after an optimizer step or a learning rate that only some ranks had"
        else:
            pattern = ": not all of them, as after an edit by hand or a fault of the memory"
        return f"{which} {from_whom}; {since}{pattern}{tie}"

    def _name(self, index: int) -> str:
        return self._names[index] if index < len(self._names) else f"number {index}"


def find_odd_ranks(values: Mapping[int, Hashable]) -> tuple[tuple[int, ...], bool]:
    """Return the ranks outside the largest group that agrees, and True; where none is the largest, all, and False.

    Args:
        values: What each rank has, such as a digest; at least two differ.
    """
    (right, most), (_, second) = Counter(values.values()).most_common(2)
    if most == second:
        return tuple(sorted(values)), False
    return tuple(sorted(rank for rank, value in values.items() if value != right)), True


# -------------------------------------------------------------------------------------------------
# How often parameters are compared: as the script requests, or the environment.

DIGEST_EVERY = "RINGSIDE_DIGEST_EVERY"
EVERY = 100
"""Steps between two comparisons, where nothing else is requested."""


def digest_steps(requested: int | str | None) -> int:
    """Return how many steps are between two comparisons: as requested, else RINGSIDE_DIGEST_EVERY, else `EVERY`.

    Raises:
        UsageError: It is no number of steps.
    """
    value = os.environ.get(DIGEST_EVERY) or EVERY if requested is None else requested
    try:
        steps = -1 if isinstance(value, float) else int(value)
    except (TypeError, ValueError):
        steps = -1
    if steps < 0:
        raise UsageError(
            f"parameters cannot be compared every {value!r} steps: give a whole number of steps, or 0 for never "
            f"(digest_every, --digest-every or {DIGEST_EVERY})"
        )
    return steps
