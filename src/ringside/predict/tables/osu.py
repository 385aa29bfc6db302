"""The output of the OSU micro-benchmarks: `osu_allreduce`, and `osu_latency` and `osu_bw` between two ranks."""

from __future__ import annotations

import re

from ringside.predict.tables.table import ALL_REDUCE, Flag, Table, TableRow, collective_named, figure

_TITLE = re.compile(r"# ?OSU (?:MPI|NCCL)\S* (\S.*?) (?:Latency |Bandwidth )?Test", re.IGNORECASE)
_RANKS = re.compile(r"(?:-np?|--ntasks(?:=|\s)|-c)\s*(?:=\s*)?(\d{1,9})\b")
_HOSTS = re.compile(r"(?:--nodes(?:=|\s)|-N)\s*(\d{1,9})\b")


def matches(text: str) -> bool:
    """Whether the text has a title of the OSU micro-benchmarks."""
    return re.search(r"^#\s*OSU\s", text, re.MULTILINE) is not None


def read(text: str, stem: str) -> list[Table]:
    """Return the tables of the output: one for every title."""
    found: list[Table] = []
    collective, scale, bandwidth = ALL_REDUCE, 1e-6, False
    rows: list[TableRow] = []
    flags: list[Flag] = []
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"#\s*OSU\s", line):
            if rows or flags:
                found.append(_table(text, stem, len(found), collective, rows, flags))
                rows, flags = [], []
            title = _TITLE.search(" ".join(line.split()))
            named = collective_named(title[1]) if title else ""
            bandwidth = not named and "bandwidth" in line.lower()
            if bandwidth:
                collective = "p2p_bandwidth"
            else:
                pairs = title is None or "latency" in line.lower()
                collective = named or ("p2p_latency" if pairs else ALL_REDUCE)
            scale = 1e6 if bandwidth else 1e-6
        elif re.match(r"^\s*[0-9]", line):
            words = line.split()
            size = figure(words[0])
            value = figure(words[1], scale) if len(words) > 1 else None
            if size is None:
                flags.append(Flag(number, f"{words[0]!r} is no size in bytes"))
            elif value is None:
                flags.append(Flag(number, "cut by a line wrap: no figure follows the size", size.value))
            elif bandwidth and value.value > 0:
                rows.append(TableRow(number, size.value, size.value / value.value, value))
            else:
                # With -f the columns are: size, average, minimum, maximum over the ranks, iterations.
                low, high = [*(figure(word, scale) for word in words[2:4]), None, None][:2]
                spread = (low.value, high.value) if low is not None and high is not None else (None, None)
                rows.append(TableRow(number, size.value, value.value, None, None, *spread))
    found.append(_table(text, stem, len(found), collective, rows, flags))
    return found


def _table(text: str, stem: str, index: int, collective: str, rows: list[TableRow], flags: list[Flag]) -> Table:
    ranks, hosts = (int(match[1]) if (match := words.search(text)) else 0 for words in (_RANKS, _HOSTS))
    name = f"{stem} ({index + 1})" if index else stem
    return Table(name, tuple(rows), tuple(flags), ranks, hosts, collective=collective, algorithm="MPI")
