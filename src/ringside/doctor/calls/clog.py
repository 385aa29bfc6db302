"""Reader of torchcomms' ClogHook (log format V1): start and end of each collective, in milliseconds.

Its lines are of one rank. An instance has no number that ranks share: its n-th call of a kind in a communicator is the
others' n-th. Calls of a graph's capture are no runs; those of its replays are told in no order and left out.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Sequence

from ringside.decoding import plain_count
from ringside.doctor.calls.judge import judge_files
from ringside.doctor.calls.record import Calls, line_batches
from ringside.doctor.files.source import Progress, Source
from ringside.doctor.findings import Findings, Note
from ringside.text import counted

KIND = "ClogHook log"
_FIRST_LINE = re.compile(rb"\AV\|\d+\|base_timestamp=")
_EVENT = re.compile(rb"C(\d{1,9})\|([SE])\|\+(\d{1,10}\.?\d{0,9})\Z")
_REPLAYED = re.compile(rb"G\d+\|R\d+\|C\d+\|E\|")
_MOST_OPEN = 10_000


def matches(source: Source) -> bool:
    """Return whether a source begins like a log of ClogHook."""
    return bool(_FIRST_LINE.match(source.head))


def read(sources: Sequence[Source], progress: Progress) -> Findings:
    """Judge the logs of one job together."""
    return judge_files(KIND, sources, progress, _read_log)


def _read_log(source: Source, calls: Calls) -> Note:
    base_s = 0.0
    ranks: dict[str, int] = {}
    signatures: dict[bytes, tuple[str, str]] = {}
    made: dict[tuple[str, str], int] = defaultdict(int)
    begun: dict[bytes, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=_MOST_OPEN))
    ended = replayed = 0
    with source.open() as stream:
        for line in (line for batch in line_batches(stream) for line in batch.splitlines()):
            if match := _EVENT.match(line):
                signature, event, moment = match[1], match[2], base_s + float(match[3])
                if signature not in signatures:
                    continue
                communicator, function = kind_of_call = signatures[signature]
                if event == b"S":
                    # ranks count a kind of call alike, whatever the signatures' own numbers
                    made[kind_of_call] += 1
                    begun[signature].append((made[kind_of_call], moment))
                elif begun[signature]:
                    seq, start_s = begun[signature].popleft()
                    took_s = max(moment - start_s, 0.0)
                    # only what ended makes a stream: `judge` takes none for empty
                    calls.stream(communicator, function, ranks[communicator]).add(seq, start_s, took_s)
                    ended += 1
                continue
            kind, *fields = line.decode("utf-8", "replace").split("|")
            named = dict(field.partition("=")[::2] for field in fields)
            if kind == "V" and (text := named.get("base_timestamp", "")).replace(".", "", 1).isdecimal():
                base_s = float(text[:20])
            elif kind == "new_comm" and "comm" in named and (rank := plain_count(named.get("rank"))) >= 0:
                ranks[named["comm"]] = rank
                size = max(plain_count(named.get("world_size")), 0)
                calls.join(named["comm"], rank, size, (source.name, source.name))
            elif fields[:1] == ["sig"] and len(fields) > 1 and (comm := named.get("comm", "")) in ranks:
                signatures[kind[1:].encode()] = comm, fields[1]
            replayed += bool(_REPLAYED.match(line))
    text = f"{counted(ended, 'collective')} of {counted(len(ranks), 'communicator')}"
    text += f", {counted(replayed, 'replayed one')} left out" if replayed else ""
    text += "; no call began or ended: LIFECYCLE is off" if signatures and not (made or replayed) else ""
    return Note(file=source.name, kind=KIND, text=text, used=bool(ranks))
