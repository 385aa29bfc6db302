"""Negative controls: with each rule broken in turn the matrix must notice, or it proves nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields

from verification.survive.broken_rules import Rules
from verification.survive.faults import Kind, Phase
from verification.survive.invariants import INVARIANTS
from verification.survive.kill_matrix import LAST_STEP, matrix_cases, run_case
from verification.survive.simulated_world import Case, WorldRules

MOST_TRIED = 400  # cases: a rule that is not noticed until then counts as not noticed
ENOUGH = 12  # cases in which an invariant is broken, to say which ones notice the rule

# Rules that matter only where something rare happens: the kinds of faults and the phases to look at.
_ONLY_SEEN_WHEN: dict[str, tuple[set[Kind], set[Phase]]] = {
    "equal_digests": ({Kind.CORRUPT}, set(Phase)),
    "verify_state": ({Kind.CORRUPT}, {Phase.FETCHING}),
    "fence": ({Kind.ALL_ASLEEP}, {Phase.BEFORE_DECIDE}),
    "keep_final": ({Kind.KILL}, {Phase.OVER, Phase.SAVING}),
    "all_come": ({Kind.KILL, Kind.DRAINED}, set(LAST_STEP)),
    "final_only": ({Kind.ZOMBIE, Kind.REPLACED, Kind.STALL, Kind.ALL_ASLEEP}, set(LAST_STEP)),
}


@dataclass(frozen=True)
class Mutant:
    """What came of breaking one rule.

    Args:
        rule: Its name in `Rules` or `WorldRules`.
        tried: How many cases were run.
        noticed: In how many an invariant was broken.
        by: How often each of the invariants was, the most frequent first.
        example: The first of them, in words.
    """

    rule: str
    tried: int
    noticed: int
    by: tuple[tuple[str, int], ...]
    example: str

    @property
    def ok(self) -> bool:
        """Whether the broken rule was noticed."""
        return self.noticed > 0


def rule_names() -> tuple[str, ...]:
    """Return the names of all rules."""
    return tuple(field.name for kind in (Rules, WorldRules) for field in fields(kind))


def break_rule(rule: str, seed: int = 0, enough: int = ENOUGH) -> Mutant:
    """Run cases with one rule broken until it was noticed often enough.

    Args:
        rule: Its name.
        seed: Of the cases.
        enough: In how many cases it must have been noticed.
    """
    own = rule in {field.name for field in fields(Rules)}  # of the state machine, not of the world around it
    broken = (Rules(**{rule: False}), WorldRules()) if own else (Rules(), WorldRules(**{rule: False}))
    tried, noticed, example = 0, 0, ""
    by = dict.fromkeys(INVARIANTS, 0)
    for case in _cases_for(rule, seed):
        result = run_case(case, *broken)
        tried += 1
        for invariant in result.broken:
            by[invariant] += 1
        if result.broken:
            noticed += 1
            example = example or "; ".join(f"{name}: {how}" for name, how in result.broken.items())
        if noticed == enough or tried == MOST_TRIED:
            break
    counts = sorted(((name, count) for name, count in by.items() if count), key=lambda row: -row[1])
    return Mutant(rule, tried, noticed, tuple(counts), example)


def _cases_for(rule: str, seed: int) -> Iterator[Case]:
    kinds, phases = _ONLY_SEEN_WHEN.get(rule, (set(Kind), set(Phase)))
    for case in itertools.chain.from_iterable(matrix_cases(seed + again) for again in itertools.count()):
        last = case.faults[-1]
        if last.kind in kinds and last.at.phase in phases:
            yield case


__all__ = ["Mutant", "break_rule", "rule_names"]
