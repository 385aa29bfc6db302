"""What watches the ranks of a job: the detector, with causes and prices, and what is worth telling."""

from __future__ import annotations

from collections import deque
from statistics import median

import msgspec
import numpy as np

from ringside.monitor.causes import explain_verdict
from ringside.monitor.run.records import Row
from ringside.monitor.run.table import tabulate
from ringside.monitor.slow_rank.detector import WINDOW, Detector
from ringside.monitor.slow_rank.judge import PriceMeter, meter_of
from ringside.monitor.slow_rank.pauses import is_of_pauses
from ringside.monitor.slow_rank.streams import PARTS
from ringside.monitor.slow_rank.window_test import PERSISTENCE
from ringside.monitor.undecided import NOT_LASTED, TOO_LITTLE, Suspect, Undecided
from ringside.monitor.verdict import Verdict, VerdictEvent, episode_end

RECORDS_KEPT = 16_384

MATERIAL = 0.02
"""The share of a job's step that a rank's excess must take up. Less holds nobody up: where a link is slow and steps
take ten times as long, the rank that sends over it may well need a millisecond more for its own work."""

LASTED_S, LOST_S = 0.3, 0.05
"""Seconds that an excess must have lasted, and must have added up to, and it must still be there. Now and then a
virtual machine's processor is another's for a fifth of a second, and two ranks on cores that share a physical one lag
by turns, by a tenth for a dozen steps: that is much where steps take milliseconds, and nobody can do anything about."""

LOOK_AGAIN = 8
"""Steps between two looks at who is slow and does not matter yet."""


class SlowRankWatcher:
    """Names ranks whose own time holds the job up: `slow_rank`, `uneven_work`, `input_bound`.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._detector = Detector(ranks, has_parts=True)
        self._recent: deque[Row] = deque(maxlen=max(32, min(WINDOW, RECORDS_KEPT // ranks)))
        self._meters: dict[int, PriceMeter] = {}
        # By rank. A finding of the detector is pending until it has lasted, then minor until it is material, then open.
        self._pending: dict[int, Verdict] = {}
        self._minor: dict[int, Verdict] = {}
        self._open: dict[int, Verdict] = {}

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Take in a completed step; see `Watcher`."""
        self._recent.append(row)
        own, (samples, routed) = np.full(self._ranks, np.nan), np.zeros((2, self._ranks))
        parts, run_delay = np.full((len(PARTS), self._ranks), np.nan), np.full(self._ranks, np.nan)
        for rank, record in row.items():
            own[rank], samples[rank], routed[rank] = record.own_seconds, record.samples, record.routed_bytes
            forward = record.forward_seconds + record.compute_seconds  # what is not told apart stands in the second
            parts[:, rank] = record.data_seconds, forward, record.backward_seconds, record.optimizer_seconds
            if record.run_delay_seconds is not None:
                run_delay[rank] = record.run_delay_seconds
        findings = self._detector.update(
            own,
            samples if samples.any() else None,
            step=step,
            routed=routed if routed.any() else None,
            parts=parts,
            run_delay=run_delay,
        )
        for meter in self._meters.values():
            meter.add(own[None])
        events = []
        for finding in findings:
            rank = finding.verdict.ranks[0]
            if not finding.ended:
                self._pending[rank] = finding.verdict
            elif rank in self._open:
                verdict = self._priced(rank, self._open.pop(rank))
                del self._meters[rank]
                events.append(episode_end(verdict, int(finding.verdict.evidence["until_step"])))
            else:  # over before it was a verdict
                self._pending.pop(rank, None)
                self._minor.pop(rank, None)
        lasted = [rank for rank, verdict in self._pending.items() if self._has_lasted(verdict)]
        self._minor.update({rank: self._pending.pop(rank) for rank in lasted})
        for rank in lasted if step % LOOK_AGAIN else list(self._minor):
            if self._is_material(self._minor[rank]):
                verdict = msgspec.structs.replace(self._minor.pop(rank), detected_step=step)
                table = tabulate((record for row in self._recent for record in row.values()), self._ranks)
                since = verdict.since_step
                verdict = explain_verdict(verdict, table.between(since), table.before(since))
                self._meters[rank] = meter_of(verdict)
                self._open[rank] = verdict
                events.append(VerdictEvent(verdict, ended=False))
        return events

    @property
    def open(self) -> list[Verdict]:
        """The verdicts whose episodes are not over, with their prices so far."""
        return [self._priced(rank, verdict) for rank, verdict in self._open.items()]

    def undecided(self) -> Undecided:
        """Return who may be slow: by the detector, or by it for sure but too briefly or by too little to be told."""
        state = self._detector.undecided()
        open_cases = [(self._pending, NOT_LASTED), (self._minor, TOO_LITTLE)]
        held = [
            Suspect(
                rank=rank,
                since_step=verdict.since_step,
                excess_ratio=verdict.excess_ratio,
                bar_ratio=1.0,
                healthy_steps=0,
                why=why,
            )
            for cases, why in open_cases
            for rank, verdict in cases.items()
        ]
        return msgspec.structs.replace(state, suspects=[*held, *state.suspects])

    def _has_lasted(self, verdict: Verdict) -> bool:
        """Return whether a rank's excess has lasted and cost enough, and is there in most of the newest steps."""
        if is_of_pauses(verdict):
            return True
        rank, seconds, lost = verdict.ranks[0], 0.0, 0.0
        late: list[bool] = []
        for row in filter(None, reversed(self._recent)):
            if next(iter(row.values())).step < verdict.since_step:
                break
            times = [time for record in row.values() for time in (record.step_seconds, record.own_seconds)]
            seconds += max((time for time in times if time > 0), default=0.0)  # what is not known is not positive
            known = {other: record.own_seconds for other, record in row.items() if record.own_seconds > 0}
            own = known.pop(rank, None)
            if own is not None:
                own -= row[rank].unclear_seconds  # of what was not seen, what is kinder to the accused
            if own is None or not known:
                continue
            usual = median(known.values())
            lost += own - usual
            late.append(own >= (1.0 + verdict.excess_ratio / 2.0) * usual)
        else:
            seconds, lost = LASTED_S, LOST_S  # longer than is remembered
        newest = late[:PERSISTENCE]
        return seconds >= LASTED_S and lost >= LOST_S and 2 * sum(newest) >= len(newest)

    def _is_material(self, verdict: Verdict) -> bool:
        """Return whether what the rank needs beyond the others is a good part of the newest steps."""
        rows = list(self._recent)[-PERSISTENCE:]
        steps = [record.step_seconds for row in rows for record in row.values() if record.step_seconds > 0]
        usual = float(verdict.evidence.get("others_own_seconds", verdict.evidence["own_seconds"]))
        return not steps or usual * verdict.excess_ratio >= MATERIAL * float(np.median(steps))

    def _priced(self, rank: int, verdict: Verdict) -> Verdict:
        return msgspec.structs.replace(verdict, cost_rank_seconds=self._meters[rank].rank_seconds)
