"""The output of the OSU micro-benchmarks: `osu_allreduce`, and `osu_latency` and `osu_bw` between two ranks."""

from __future__ import annotations

import re

from ringside.predict.tables.table import ALL_REDUCE, Figure, Flag, Table, TableRow, collective_named, figure

_TITLE = re.compile(r"# ?OSU (?:MPI|NCCL)\S* (\S.*?) (?:Latency |Bandwidth )?Test", re.IGNORECASE)
_NAMES = re.compile(r"^#\s*Size\s+(.*)$", re.IGNORECASE)
_RANKS = re.compile(r"(?:-np?|--ntasks(?:=|\s)|-c)\s*(?:=\s*)?(\d{1,9})\b")
_HOSTS = re.compile(r"(?:--nodes(?:=|\s)|-N)\s*(\d{1,9})\b")


def recognises(text: str) -> bool:
    """Whether the text has a title of the OSU micro-benchmarks."""
    return re.search(r"^#\s*OSU\s", text, re.MULTILINE) is not None


def read(text: str, stem: str) -> list[Table]:
    """Return the tables of the output: one for every title."""
    found: list[Table] = []
    collective, scale, bandwidth = ALL_REDUCE, 1e-6, False
    columns = 0
    rows: list[TableRow] = []
    flags: list[Flag] = []
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"#\s*OSU\s", line):
            if rows or flags:
                found.append(_table(text, stem, len(found), collective, rows, flags))
                rows, flags = [], []
            collective, bandwidth = _collective(line)
            scale = 1e6 if bandwidth else 1e-6
        elif match := _NAMES.match(line):
            columns = 1 + len(re.findall(r"\(|Iterations", match[1])) if "(" in match[1] else 2
        elif re.match(r"^\s*[0-9]", line):
            _take(number, line, scale, bandwidth, columns, rows, flags)
    found.append(_table(text, stem, len(found), collective, rows, flags))
    return found


def _take(
    number: int, line: str, scale: float, bandwidth: bool, columns: int, rows: list[TableRow], flags: list[Flag]
) -> None:
    words = line.split()
    size = figure(words[0])
    value = figure(words[1], scale) if len(words) > 1 else None
    if size is None:
        flags.append(Flag(number, f"{words[0]!r} is no size in bytes"))
    elif value is None or (columns and len(words) < min(columns, 2)):
        flags.append(Flag(number, "cut by a line wrap: no figure follows the size", size.value))
    elif bandwidth and value.value > 0:
        rows.append(TableRow(number, size.value, size.value / value.value, value))
    else:
        low, high = _spread(words, scale)
        rows.append(TableRow(number, size.value, value.value, None, None, low, high))


def _spread(words: list[str], scale: float) -> tuple[float | None, float | None]:
    # With -f the columns are: size, average, minimum, maximum over the ranks, iterations.
    extra: list[Figure | None] = [figure(word, scale) for word in words[2:4]]
    if len(extra) < 2 or extra[0] is None or extra[1] is None:
        return None, None
    return extra[0].value, extra[1].value


def _collective(line: str) -> tuple[str, bool]:
    match = _TITLE.search(" ".join(line.split()))
    what = match[1] if match else ""
    named = collective_named(what)
    if named:
        return named, False
    if "bandwidth" in line.lower():
        return "p2p_bandwidth", True
    return ("p2p_latency", False) if not what or "latency" in line.lower() else (ALL_REDUCE, False)


def _table(text: str, stem: str, index: int, collective: str, rows: list[TableRow], flags: list[Flag]) -> Table:
    ranks, hosts = _RANKS.search(text), _HOSTS.search(text)
    return Table(
        f"{stem} ({index + 1})" if index else stem,
        tuple(rows),
        tuple(flags),
        int(ranks[1]) if ranks else 0,
        int(hosts[1]) if hosts else 0,
        "",
        collective,
        "MPI",
    )
