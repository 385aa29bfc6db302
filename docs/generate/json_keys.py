"""docs/json.md, made from the schemas in docs/schemas: what `--json` prints, key by key.

`python -m docs.generate.json_keys > docs/json.md` writes it; a test fails when it is stale.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).resolve().parents[1] / "schemas"

_HEAD = """# JSON output

What `--json` prints, made from the schemas in [schemas/](schemas/) by `python -m docs.generate.json_keys`. Times are
seconds, sizes bytes, ratios fractions (0.12 is 12%); what is not known is null. A key in *italics* is not always
there. New keys may be added without notice: ignore those that you do not know. `schema` changes where a key changes
its meaning or goes.
"""

_OTHERS = """
## Commands without a schema

### bench

```text
schema, ranks, cores, cache_bytes (last-level cache), wrong (all rows)
stream_limit_bytes_per_second  2 reads + 2 non-temporal writes on every rank
skipped[]   peer, reason
rows[]      size_bytes, count, type, redop, root (-1: none)
            engine (ringside, gloo, mpi), algorithm ("auto" or the one forced)
            tensor (symmetric, private), cache (warm, cold, any), buffers
            iterations (per round), time_seconds (median of rounds_seconds[])
            algbw_bytes_per_second, busbw_bytes_per_second, wrong (elements)
            ratios{gloo, mpi} (peer's time over ours; rows of ours only)
            limit_share (0 to 1; null for private tensors and those in cache)
```

### demo

As `report`, with `run_dir`. With `--kill`: killed (rank), seconds (from the kill to the next committed step), lost,
twice (samples lost, steps counted twice), back, samples, digests[].

### lab

On stdout; what ranks write goes to stderr.

```text
schema, name, wiring, rate_bits_per_second (null: no limit), delay_seconds
exit_status, seconds, timed_out
ranks[]  rank, host, status (-9: killed), seconds, ended_by_lab
hosts[]  host, received_bytes, sent_bytes (over its links, headers included)
```

### predict fit

```text
schema, path, topology (in words), tables[]: name, ranks, hosts, collective, algorithm, rows, flagged,
latency_s and algbw_bytes_per_s (expected, value, low, high), held_out and other_scales (mape, band_coverage, rows;
null where too few rows or scales are there)
```

### predict score

```text
schema, mode, tables[]:
  name, rows, flagged, mape, median, bias, worst_size_bytes, band_coverage
  baselines: mape of hockney, interpolation, nccl_constants; null where one does not apply
  mape_large (from 1 MiB), full_sweep, ranks, hosts, collective, law (in words), fitted_rows, scored_rows, path
  refused (why it was not scored; empty if it was), flags[]: line, size_bytes, reason
  points[] (with --points): size_bytes, measured_s, predicted_s, low_s, high_s, extrapolated
summary: tables, rows, and the medians over tables of mape, mape_large, bias and baselines; band_coverage of all rows
```

### predict simulate

```text
schema, algorithm, topology, ranks, size_bytes, seconds, band (value, low, high), extrapolated, busbw
finish_seconds[] by rank, guilty (kind, ranks, seconds), shares (seconds of the critical path by kind)
critical_path[]: round, src, dst, peer, begin_s, end_s, wire_s, alpha_s, shared_s
```

### probe

The same as the file that `-o` writes, a topology.

```text
schema, kind ("ringside topology"), source, reduce_bytes_per_s, overhead_s
hosts[]  name, ranks, out_bytes_per_s, in_bytes_per_s (all links together)
links[]  src, dst (of hosts[]), alpha_s, bytes_per_s; empty if one is broken
ok, verdict[] (in words), broken[] (pairs of hosts), missing_ranks[]
slow[]   src, dst (null: all links of src), bytes_per_s, usual_bytes_per_s
better_order (null: none), rings[]: order, seconds (all-reduce of 4 MiB)
```

### top

schema, where, name, stage, step, of (at most so many), trouble, verdicts[] (as of `report`, with `over`), notes[],
ranks[] (as of the screen).

### verify

schema, ok, audits[]: one of each schedule. Bytes are in units of the tensor's size, as a number and, with `_exact`, as
a fraction.

### what-if

```text
schema, what (in words), topology, hosts, ranks, recorded
delta_seconds (value, low, high), work_delta_seconds
step_seconds and exposed_seconds (before, after: value, low, high; low = high: input)
buckets, bucket_seconds (null: own work only)
rank_hours_per_day (null: computation is not known), money_per_day, kwh_per_day
extrapolated[]
critical_path (played, exact for the figures): algorithm, guilty (kind, ranks, seconds)
  blamed[] (all who are worth naming), shares (seconds by kind), hops
```
"""


def page() -> str:
    """Return the text of docs/json.md."""
    parts = [_HEAD]
    for path in sorted(SCHEMAS.glob("*.json")):
        schema = json.loads(path.read_text())
        parts.append(f"\n## {path.stem}\n\n{schema['title']}; schema: [{path.name}](schemas/{path.name}).\n")
        parts.append("\n".join(["\n| key | type | |", "|---|---|---|", *_rows(schema, "", schema["$defs"]), ""]))
        for name, shared in schema["$defs"].items():
            heading = f"\nWhere the type is *{name}*"
            about = shared.get("description", "").rstrip(".")
            parts.append(f"{heading}: {about[:1].lower() + about[1:]}.\n" if about else f"{heading}:\n")
            parts.append("\n".join(["\n| key | type | |", "|---|---|---|", *_rows(shared, "", schema["$defs"]), ""]))
    return "".join(parts) + _OTHERS


def _rows(schema: dict[str, Any], prefix: str, shared: dict[str, Any]) -> Iterator[str]:
    """Yield a row for each key of an object, those of objects inside it below."""
    for key, part in schema["properties"].items():
        name = f"{prefix}{key}"
        words, inner, path = _kind(part, name)
        shown = f"`{name}`" if key in schema.get("required", ()) else f"*`{name}`*"
        yield f"| {shown} | {words} | {part.get('description', '')} |"
        if "properties" in inner:
            yield from _rows(inner, f"{path}.", shared)


def _kind(part: dict[str, Any], path: str) -> tuple[str, dict[str, Any], str]:
    """Return a type in words, the object inside it (empty: none) and the path of that object's keys."""
    if "$ref" in part:
        return f"*{part['$ref'].rpartition('/')[2]}*", {}, path
    if "anyOf" in part:
        return " or ".join(_kind(each, path)[0] for each in part["anyOf"]), {}, path
    if "enum" in part:
        return " or ".join(f"`{value}`" for value in part["enum"]), {}, path
    if part["type"] == "array":
        words, inner, inside = _kind(part["items"], f"{path}[]")
        return f"list of {words}", inner, inside
    words = part["type"] if isinstance(part["type"], str) else " or ".join(part["type"])
    if isinstance(part.get("additionalProperties"), dict):
        return f"object of {_kind(part['additionalProperties'], path)[0]}", {}, path
    return words, part, path


if __name__ == "__main__":
    print(page(), end="")
