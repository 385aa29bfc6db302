"""The JSON that nccl-tests writes with `-J FILE` (`--output_file`): `config`, `devices` and `results`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ringside.decoding import UNDECODABLE
from ringside.errors import UsageError
from ringside.predict.tables.table import ALL_REDUCE, Figure, Flag, Table, TableRow, collective_named


def matches(text: str) -> bool:
    """Whether the text is a JSON object or list."""
    return text.lstrip()[:1] in ("{", "[")


def read(text: str, stem: str) -> list[Table]:
    """Return the tables of a document, or of a list of documents.

    Raises:
        UsageError: It is no JSON, or holds no list `results`.
    """
    try:
        data = json.loads(text)
    except UNDECODABLE as error:
        raise UsageError(f"{stem}: not JSON ({error}); nccl-tests writes it with -J FILE") from None
    documents = data if isinstance(data, list) else [data]
    if not documents or not all(isinstance(each, dict) and isinstance(each.get("results"), list) for each in documents):
        raise UsageError(f"{stem}: JSON without a list of results; nccl-tests writes one with -J FILE")
    return [_table(each, stem if len(documents) == 1 else f"{stem} ({i + 1})") for i, each in enumerate(documents)]


def _table(document: Mapping[str, Any], name: str) -> Table:
    rows: list[TableRow] = []
    flags: list[Flag] = []
    for number, result in enumerate(document["results"], 1):
        found = _row(number, result)
        if isinstance(found, TableRow):
            rows.append(found)
        else:
            flags.append(found)
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
    return Table(name, tuple(rows), tuple(flags), len(devices), len(hosts), kinds, collective, "auto")


def _row(number: int, result: object) -> TableRow | Flag:
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
    return TableRow(number, size, time * 1e-6, _rate(body.get("alg_bw")), _rate(body.get("bus_bw")))


def _rate(value: object) -> Figure | None:
    # Written in full precision; a digit of slack for writers that round.
    number = _number(value)
    return Figure(number * 1e9, abs(number) * 1e6) if number is not None else None


def _number(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
