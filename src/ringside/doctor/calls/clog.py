"""Reader of torchcomms' ClogHook (log format V1): start and end of each collective, in milliseconds.

Its lines are of one rank. An instance has no number that ranks share: its n-th call of a kind in a communicator is the
others' n-th. Calls of a graph's capture are no runs; those of its replays are told in no order and left out.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

from ringside.decoding import plain_count
from ringside.doctor.calls.judge import judge_files
from ringside.doctor.calls.record import Calls, Stream, line_batches
from ringside.doctor.files.source import Progress, Source
from ringside.doctor.findings import Findings, Note
from ringside.text import counted

KIND = "ClogHook log"
_FIRST_LINE = re.compile(rb"\AV\|\d+\|base_timestamp=")
_LINE = re.compile(
    rb"^(?:C(\d{1,9})\|([SE])\|\+(\d{1,10}\.?\d{0,9})"  # a call of this signature starts or ends
    rb"|((?:V|new_comm|C\d{1,9}\|sig)\|.*)"  # what is needed to understand these
    rb"|(G\d+\|R\d+\|C\d+\|E)\|.*)\r?$",  # one in a graph that is replayed ends
    re.MULTILINE,
)
MOST_SIGNATURES = 1 << 17
_MOST_OPEN = 10_000


def matches(source: Source) -> bool:
    """Return whether a source begins like a log of ClogHook."""
    return bool(_FIRST_LINE.match(source.head))


def read(sources: Sequence[Source], progress: Progress) -> Findings:
    """Judge the logs of one job together."""
    return judge_files(KIND, sources, progress, _read_log)


class _Kind:
    """Calls of one function that a rank made in a communicator.

    Attributes:
        named: The communicator, the function and the rank.
        made: How many have started.
        stream: Those that have ended; None: none has, for `judge` takes no stream for empty.
    """

    __slots__ = ("made", "named", "stream")

    def __init__(self, named: tuple[str, str, int]) -> None:
        self.named, self.made = named, 0
        self.stream: Stream | None = None


def _read_log(source: Source, calls: Calls) -> Note:
    base_s = 0.0
    ranks: dict[str, int] = {}
    kinds: dict[tuple[str, str, int], _Kind] = {}
    # Of each signature its kind, for ranks count these alike whatever the signatures' own numbers, and what is open.
    signatures: dict[bytes, tuple[_Kind, deque[tuple[int, float]]]] = {}
    ended = replayed = 0
    with source.open() as stream:
        lines = (line for batch in line_batches(stream) for line in _LINE.findall(batch))
        for signature, event, moment, text, replay in lines:
            if signature:
                if (known := signatures.get(signature)) is None:
                    continue
                kind, begun = known
                if event == b"S":
                    kind.made += 1
                    begun.append((kind.made, base_s + float(moment)))
                elif begun:
                    seq, start_s = begun.popleft()
                    if kind.stream is None:
                        kind.stream = calls.stream(*kind.named)
                    kind.stream.add(seq, start_s, max(base_s + float(moment) - start_s, 0.0))
                    ended += 1
                continue
            if replay:
                replayed += 1
                continue
            word, *fields = text.decode("utf-8", "replace").rstrip("\r").split("|")
            named = dict(field.partition("=")[::2] for field in fields)
            comm = named.get("comm", "")
            if word == "V" and (base := named.get("base_timestamp", "")).replace(".", "", 1).isdecimal():
                base_s = float(base[:20])
            elif word == "new_comm" and "comm" in named and (rank := plain_count(named.get("rank"))) >= 0:
                ranks[comm] = rank
                calls.join(comm, rank, max(plain_count(named.get("world_size")), 0), (source.name, source.name))
            elif fields[0] == "sig" and len(fields) > 1 and comm in ranks and len(signatures) < MOST_SIGNATURES:
                of, name = (comm, fields[1], ranks[comm]), word[1:].encode()
                kind = kinds.setdefault(of, _Kind(of))
                if name not in signatures or signatures[name][0] is not kind:  # told again, it keeps what is open
                    signatures[name] = kind, deque(maxlen=_MOST_OPEN)
    text_of = f"{counted(ended, 'collective')} of {counted(len(ranks), 'communicator')}"
    text_of += f", {counted(replayed, 'replayed one')} left out" if replayed else ""
    has_run = replayed or any(kind.made for kind in kinds.values())
    text_of += "; no call began or ended: LIFECYCLE is off" if signatures and not has_run else ""
    return Note(file=source.name, kind=KIND, text=text_of, used=bool(ranks))
