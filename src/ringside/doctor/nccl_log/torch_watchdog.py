"""PyTorch's own lines in a log: the NCCL watchdog's timeouts and torchrun's account of which worker failed first."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from ringside.doctor.findings import verdict_of_files
from ringside.monitor.verdict import Verdict
from ringside.text import counted, name_ranks, rank_list

_TIMEOUT = re.compile(
    r"\[Rank (?P<rank>\d{1,9})\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d{1,18}), "
    r"OpType=(?P<op>\w+)(?:, NumelIn=(?P<numel>\d{1,18})(?!\d))?"
)
_RAN = re.compile(r"Timeout\(ms\)=\d+\) ran for (\d{1,18})(?!\d)")
_GROUP = re.compile(r"\[PG (?:ID )?\S+(?: PG GUID \S+?)? Rank (\d{1,9})\]")
_STANDING = re.compile(
    r"work: \d+, last enqueued NCCL work: (?P<enqueued>-?\d{1,18}), "
    r"last completed NCCL work: (?P<completed>-?\d{1,18})(?!\d)"
)
_FIRST = re.compile(r"Root Cause \(first observed failure\)")
_FIELD = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*:\s*(.*)$")
MARKS = (b"Watchdog caught collective operation timeout", b"Root Cause (first observed failure)", b"ProcessGroupNCCL")


@dataclass
class TorchLines:
    """What PyTorch printed in the logs of a job.

    Attributes:
        timeouts: The first timeout of each rank: sequence number, operation, elements, seconds it ran.
        standing: (last enqueued, last completed) of each rank, from the watchdog.
        roots: Workers that torchrun saw fail first: its fields in text.
    """

    timeouts: dict[int, tuple[int, str, int, float]] = field(default_factory=dict)
    standing: dict[int, tuple[int, int]] = field(default_factory=dict)
    roots: list[dict[str, str]] = field(default_factory=list)
    _in_root: bool = False

    def add(self, text: str) -> bool:
        """Read one line; return whether it was of any use."""
        if (match := _TIMEOUT.search(text)) and (ran := _RAN.search(text, match.end())):
            timeout = (int(match["seq"]), match["op"], int(match["numel"] or 0), int(ran[1]) / 1e3)
            known = self.timeouts.get(int(match["rank"]))
            self.timeouts[int(match["rank"])] = timeout if known is None or timeout[0] < known[0] else known
        elif (group := _GROUP.search(text)) and (match := _STANDING.search(text, group.end())):
            self.standing.setdefault(int(group[1]), (int(match["enqueued"]), int(match["completed"])))
        elif _FIRST.search(text):
            self._in_root = True
            self.roots.append({})
        elif self._in_root and (match := _FIELD.match(text)):
            self.roots[-1].setdefault(match[1], match[2].strip())
            self._in_root = match[1] != "traceback"
        else:
            return False
        return True


def judge_torch(lines: TorchLines) -> list[Verdict]:
    """Return what the watchdog and torchrun show: a failed worker before those that timed out waiting for it."""
    failed = []
    for root in lines.roots:
        if root.get("rank", "").split(" ")[0].isdigit():
            rank = int(root["rank"].split(" ")[0])
            status = root.get("exitcode", "").split(" ")[0]
            why = f"exit status {status}" if status else "it failed"
            reason = root.get("traceback", "")
            failed.append(
                verdict_of_files(
                    "dead_rank",
                    [rank],
                    f"torchrun saw it fail first ({why}){': ' + reason if reason else ''}",
                    {
                        **{key: value for key, value in root.items() if value and key != "rank"},
                        "victims": rank_list(set(lines.timeouts) - {rank}),
                    },
                    "Read this rank's traceback; exit status -9 is SIGKILL, mostly the kernel's out-of-memory killer "
                    "(dmesg).",
                )
            )
    if failed or not lines.timeouts:
        return failed
    # The call in which most ranks wait, the earliest of several: what timed out later is a consequence.
    seqs = Counter((seq, op) for seq, op, _, _ in lines.timeouts.values())
    seq, op = max(seqs, key=lambda key: (seqs[key], -key[0]))
    waiting = {rank for rank, timeout in lines.timeouts.items() if timeout[:2] == (seq, op)}
    behind = {rank for rank, (enqueued, _) in lines.standing.items() if enqueued < seq}
    others = {rank: timeout for rank, timeout in lines.timeouts.items() if rank not in waiting and timeout[0] <= seq}
    numel, ran = next((timeout[2], timeout[3]) for rank, timeout in lines.timeouts.items() if rank in waiting)
    evidence: dict[str, float | int | str] = {
        "collective_seq_id": seq,
        "collective": op,
        "elements": numel,
        "waited_seconds": ran,
        "standing": ", ".join(
            f"rank {rank} enqueued {number}" for rank, (number, _) in sorted(lines.standing.items())[:16]
        ),
    }
    if others and not behind:
        elsewhere = ", ".join(f"rank {rank} was in {other[1]} {other[0]}" for rank, other in sorted(others.items())[:4])
        cause = f"most ranks timed out in {op} {seq}, but {elsewhere}"
        advice = (
            "Every rank must call the same collectives in the same order; look for branches on the rank or on data."
        )
        return [verdict_of_files("mismatch", list(others), cause, {**evidence, "victims": rank_list(waiting)}, advice)]
    silent = set(range(max(waiting) + 1)) - set(lines.timeouts) - set(lines.standing)
    culprits = sorted(behind or (silent if len(silent) == 1 and len(waiting) > 1 else set()))
    whose = f"{name_ranks(culprits)} never came to it" if culprits else "who never came to it is not in this log"
    cause = f"{counted(len(waiting - set(culprits)), 'rank')} timed out in {op} {seq}: {whose}"
    advice = "Give the flight-recorder dumps as well (TORCH_FR_BUFFER_SIZE=2000, TORCH_NCCL_DUMP_ON_TIMEOUT=1)."
    return [
        verdict_of_files("hang", culprits, cause, {**evidence, "victims": rank_list(waiting - set(culprits))}, advice)
    ]
