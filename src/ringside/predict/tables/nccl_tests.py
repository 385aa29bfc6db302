"""Raw logs of nccl-tests and rccl-tests, whatever a launcher wrote before each line, and the JSON of `-J FILE`.

The columns are `size count type [redop] [root]`, then `time algbw busbw #wrong` out of place and again in place. The
out-of-place figures are taken, as published tables do.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ringside.decoding import UNDECODABLE
from ringside.errors import UsageError
from ringside.predict.tables.table import (
    ALL_REDUCE,
    Figure,
    Flag,
    Table,
    TableRow,
    collective_named,
    figure,
    wrong_sums,
)

_HEADER = re.compile(r"#\s+size\s+count\s+type\b")
_TYPES = r"(?:u?int\d+|float|double|half|bfloat16|u?char|f8e\w+|fp8_\w+|float8_\w+|uint8|int8|float16|float32|float64)"
_START = re.compile(rf"(?<![\w.])(\d+)\s+(\d+)\s+({_TYPES})\b(.*)$")
_DEVICE = re.compile(
    r"#\s+Rank\s+(\d{1,9})\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.+?)\s*$"
)
_PROGRAM = re.compile(r"\b(all_reduce|all_gather|reduce_scatter|alltoall|sendrecv|broadcast|reduce)_perf\b")
_NUMBER = re.compile(r"^-?\d+(?:\.\d+)?(?:e[+-]?\d+)?$", re.IGNORECASE)
_TAIL = re.compile(r"^(?:\[[^\]]*\](?:<\w+>)?:?\s*)?(?:-?\d[\d.e+]*\s+)*(?:-?\d[\d.e+]*|N/A)$")


def matches(text: str) -> bool:
    """Whether the text is a JSON object or list, or has the header or the rows of nccl-tests."""
    return _is_json(text) or _HEADER.search(text) is not None or any(_row(1, line) for line in text.splitlines()[:2000])


def read(text: str, stem: str) -> list[Table]:
    """Return the tables of a log, one for every header that follows rows, or of a JSON document or a list of them.

    Raises:
        UsageError: It begins as JSON and is none, or holds no list `results`.
    """
    if _is_json(text):
        return _read_json(text, stem)
    tables: list[Table] = []
    devices: dict[int, tuple[str, str]] = {}
    rows: list[TableRow] = []
    flags: list[Flag] = []
    collective = ""
    cut = False
    for number, line in enumerate(text.splitlines(), 1):
        device, program = _DEVICE.search(line), _PROGRAM.search(line)
        another = program is not None and collective not in ("", program[1]) and "concluded" not in line
        if rows and (device or another):
            tables.append(_table(stem, len(tables), rows, flags, devices, collective))
            rows, flags, devices = [], [], {}
        if device:
            devices[int(device[1])] = (device[2], device[3])
        elif program:
            collective = program[1]
        else:
            found = _row(number, line)
            if isinstance(found, TableRow):
                rows.append(found)
                cut = False
            elif isinstance(found, Flag):
                flags.append(found)
                cut = "line wrap" in found.reason
            elif cut and line.strip() and _TAIL.match(line.strip()):  # `cut` stays: an end may be wrapped again
                flags.append(Flag(number, "the end of a row that a line wrap cut"))
            else:
                cut = False
    if rows or flags or not tables:
        tables.append(_table(stem, len(tables), rows, flags, devices, collective))
    return tables


def _row(number: int, line: str) -> TableRow | Flag | None:
    """Return the row that a line holds, or what is wrong with it; None for a line that is no row."""
    if "#" in line.split("[", 1)[0][:3]:
        return None
    match = _START.search(line)
    if match is None:
        return None
    size = float(match[1])
    words = match[4].split()
    words = words[1:] if words and not _NUMBER.match(words[0]) and words[0] != "N/A" else words
    numbers = [word for word in words if _NUMBER.match(word) or word.upper() in ("N/A", "NAN", "INF", "-NAN", "-INF")]
    if len(numbers) != len(words):
        odd = next(word for word in words if word not in numbers)
        return Flag(number, f"{odd!r} is among the figures", size)
    # The first figure is the column `root` if it is a whole number with an odd or full row behind it.
    full = len(numbers) in (5, 9) or len(numbers) > 9
    if numbers and re.fullmatch(r"-?\d+", numbers[0]) and (full or numbers[0].startswith("-")):
        numbers = numbers[1:]
    if len(numbers) < 3:
        return Flag(number, "cut by a line wrap: time, algbw and busbw do not follow", size)
    time, algbw, busbw = (figure(word) for word in numbers[:3])
    if time is None:
        return Flag(number, f"{numbers[0]!r} is no time", size)
    row = TableRow(number, size, time.value * 1e-6, _gigabytes(algbw), _gigabytes(busbw))
    return wrong_sums(number, numbers[3::4], size) or row


def _gigabytes(read: Figure | None) -> Figure | None:
    return Figure(read.value * 1e9, read.half_digit * 1e9) if read is not None else None


def _table(
    stem: str, index: int, rows: list[TableRow], flags: list[Flag], devices: Mapping[int, tuple[str, str]], program: str
) -> Table:
    name = f"{stem} ({index + 1})" if index else stem
    ranks, hosts = max(devices, default=-1) + 1, len({host for host, _ in devices.values()})
    cluster = ", ".join(dict.fromkeys(device for _, device in devices.values()))
    collective = collective_named(program) or ALL_REDUCE
    return Table(name, tuple(rows), tuple(flags), ranks, hosts, cluster, collective, "auto")


# -------------------------------------------------------------------------------------------------
# The JSON that nccl-tests writes with `-J FILE` (`--output_file`): `config`, `devices` and `results`.


def _is_json(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[")


def _read_json(text: str, stem: str) -> list[Table]:
    """Return the tables of a document, or of a list of documents."""
    try:
        data = json.loads(text)
    except UNDECODABLE as error:
        raise UsageError(f"{stem}: not JSON ({error}); nccl-tests writes it with -J FILE") from None
    documents = data if isinstance(data, list) else [data]
    if not documents or not all(isinstance(each, dict) and isinstance(each.get("results"), list) for each in documents):
        raise UsageError(f"{stem}: JSON without a list of results; nccl-tests writes one with -J FILE")
    return [_json_table(each, stem if len(documents) == 1 else f"{stem} ({i + 1})") for i, each in enumerate(documents)]


def _json_table(document: Mapping[str, Any], name: str) -> Table:
    found = [_json_row(number, result) for number, result in enumerate(document["results"], 1)]
    rows = tuple(row for row in found if isinstance(row, TableRow))
    flags = tuple(flag for flag in found if isinstance(flag, Flag))
    config = document.get("config")
    listed = document.get("devices") or (config.get("devices") if isinstance(config, dict) else None) or []
    devices = [device for device in listed if isinstance(device, dict)] if isinstance(listed, list) else []
    hosts = {str(device.get("hostname", "")) for device in devices}
    kinds = ", ".join(dict.fromkeys(str(device.get("device_info", "")) for device in devices))
    # Which collective it was stands in a program's name, wherever this version of nccl-tests writes it.
    results = document["results"]
    named = [document.get("program", ""), document.get("test", ""), *document.get("args", [])]
    named += [result.get("experiment_name", "") for result in results[:1] if isinstance(result, dict)]
    collective = collective_named(*(str(word).rsplit("/", 1)[-1] for word in named)) or ALL_REDUCE
    return Table(name, rows, flags, len(devices), len(hosts), kinds, collective, "auto")


def _json_row(number: int, result: object) -> TableRow | Flag:
    if not isinstance(result, dict):
        return Flag(number, "no result but something else")
    size = _number(result.get("size"))
    if size is None:
        return Flag(number, f"size {result.get('size')!r} is no number of bytes")
    body = result.get("out_of_place") or result.get("in_place")
    if not isinstance(body, dict):
        return Flag(number, "neither out_of_place nor in_place", size)
    time = _number(body.get("time", body.get("cpu_time")))
    if time is None:
        return Flag(number, f"time {body.get('time')!r} is no number of microseconds", size)
    bodies = [result.get(name) for name in ("out_of_place", "in_place")]
    counts = [str(each.get("nwrong")) if isinstance(each, dict) else "" for each in bodies]
    if wrong := wrong_sums(number, counts, size):
        return wrong
    return TableRow(number, size, time * 1e-6, _json_rate(body.get("alg_bw")), _json_rate(body.get("bus_bw")))


def _json_rate(value: object) -> Figure | None:
    # Written in full precision; a digit of slack for writers that round.
    number = _number(value)
    return Figure(number * 1e9, abs(number) * 1e6) if number is not None else None


def _number(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
