"""A topology from a preset's name, a TOML file, or what `ringside probe` wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from ringside.decoding import UNDECODABLE
from ringside.errors import UsageError
from ringside.predict.topology.topology import LinkClass, LinkOverride, MeasuredTimes, Switch, Topology
from ringside.text import did_you_mean

# -------------------------------------------------------------------------------------------------
# A topology in TOML; one line per mistake. All its keys::
#
# schema = 1
# name = "two boxes"
# hosts = 2
# ranks_per_host = 4              # or one number per host: [4, 2]
# nics = 1
# rails = "own"                   # or "pooled": a message uses all interfaces of its host
# oversubscription = 2.0
# hosts_per_leaf = 4
# reduce_bytes_per_s = 10e9
# overhead_s = 0.0
# [inside]                        # between ranks of a host
# kind = "pcie"
# alpha_s = 2.5e-6
# bytes_per_s = 24e9
# host_bytes_per_s = 40e9         # what they carry together
# [between]                       # between hosts, one interface
# kind = "roce"
# alpha_s = 4e-6
# bytes_per_s = 12e9
# [nvls]                          # a switch inside that reduces; [sharp]: between
# alpha_s = 6e-6
# bytes_per_s = 300e9
# [[override]]                    # a link that differs, both ways unless one_way = true
# hosts = [0, 1]                  # or ranks = [3, 4]
# bytes_per_s = 3e9
# [[measured]]                    # times of collectives on this hardware: `ringside predict fit` writes them
# ranks_per_host = [8, 8]
# nics = 8
# collective = "all_reduce"
# algorithm = "auto"              # or the one that was forced: "ring"
# sizes_bytes = [1048576, 1073741824]
# times_s = [8.1e-5, 0.0058]
# source = "nccl.log"
# [source]
# "inside.alpha_s" = "measured"

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = 1
_T = TypeVar("_T")
_NUMBER, _WHOLE, _TEXT, _FLAG = "a number", "a whole number", "text", "true or false"
_PAIR, _COUNTS = "two whole numbers such as [0, 1]", "a whole number, or one for every host"
_RANKS, _FIGURES = "a list of whole numbers, one for every host", "a list of numbers"
_LINK = {"kind": _TEXT, "alpha_s": _NUMBER, "bytes_per_s": _NUMBER, "host_bytes_per_s": _NUMBER}
_SWITCH = {"alpha_s": _NUMBER, "bytes_per_s": _NUMBER}
_OVERRIDE = {"hosts": _PAIR, "ranks": _PAIR, "alpha_s": _NUMBER, "bytes_per_s": _NUMBER, "one_way": _FLAG}
_MEASURED = {"ranks_per_host": _RANKS, "nics": _WHOLE, "sizes_bytes": _FIGURES, "times_s": _FIGURES}
_MEASURED |= dict.fromkeys(("collective", "algorithm", "source"), _TEXT)
_KEYS = {
    "schema": _WHOLE,
    "name": _TEXT,
    "hosts": _WHOLE,
    "ranks_per_host": _COUNTS,
    "nics": _WHOLE,
    "rails": _TEXT,
    "oversubscription": _NUMBER,
    "hosts_per_leaf": _WHOLE,
    "reduce_bytes_per_s": _NUMBER,
    "overhead_s": _NUMBER,
}
_PLAIN = tuple(_KEYS)[4:]  # a topology has them under the same names
_TABLES = {"inside": _LINK, "between": _LINK, "nvls": _SWITCH, "sharp": _SWITCH}
_NEEDED = {"inside": ("kind", "alpha_s", "bytes_per_s"), "between": ("kind", "alpha_s", "bytes_per_s")}

_MOST_HOSTS = 1_000_000


def from_toml(text: str, origin: str = "topology") -> Topology:
    """Return the topology that TOML describes; see the module for its keys.

    Args:
        text: The TOML.
        origin: What to call it in errors, such as the file's name.

    Raises:
        UsageError: It is no TOML, a key is unknown, missing or of another type, or the topology cannot be; one line per
            mistake.
    """
    try:
        data = tomllib.loads(text)
    except UNDECODABLE as error:
        raise UsageError(f"{origin}: no TOML: {error}") from None
    mistakes = _mistakes(data)
    if mistakes:
        raise UsageError("\n".join(f"{origin}: {mistake}" for mistake in mistakes))
    per = data["ranks_per_host"]
    if data["hosts"] > _MOST_HOSTS:
        raise UsageError(f"{origin}: hosts: at most {_MOST_HOSTS:,}, not {data['hosts']}")
    if isinstance(per, list) and len(per) != data["hosts"]:
        raise UsageError(f"{origin}: ranks_per_host: {data['hosts']} numbers, one for every host, not {len(per)}")
    tables: dict[str, Any] = {
        name: _made(LinkClass if name in _NEEDED else Switch, data[name], f"{origin}: {name}")
        for name in _TABLES
        if name in data
    }
    overrides = []
    for table in data.get("override", []):
        of = "hosts" if "hosts" in table else "ranks"
        a, b = table[of]
        for src, dst in [(a, b)] if table.get("one_way", False) else [(a, b), (b, a)]:
            overrides.append(LinkOverride(src, dst, table.get("alpha_s"), table.get("bytes_per_s"), of))
    measured = []
    for number, table in enumerate(data.get("measured", []), 1):
        lists = {key: tuple(table[key]) for key in ("ranks_per_host", "sizes_bytes", "times_s")}
        measured.append(_made(MeasuredTimes, table | lists, f"{origin}: measured {number}"))
    return Topology(
        name=data.get("name", origin),
        ranks_per_host=tuple(per) if isinstance(per, list) else (per,) * max(data["hosts"], 0),
        overrides=tuple(overrides),
        measured=tuple(measured),
        sources=dict(data.get("source", {})),
        **{key: data[key] for key in _PLAIN if key in data},
        **tables,
    )


def _made(kind: Callable[..., _T], figures: Mapping[str, Any], where: str) -> _T:
    """Return a value made of figures; every line of the error, if they cannot be, says where they stand."""
    try:
        return kind(**figures)
    except UsageError as error:
        raise UsageError("\n".join(f"{where}.{line}" for line in str(error).splitlines())) from None


def _mistakes(data: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the keys of a file and their types, a line each."""
    found = [f"{key}: is missing" for key in ("schema", "hosts", "ranks_per_host") if key not in data]
    if data.get("schema", SCHEMA) != SCHEMA:
        found.append(f"schema: this is read as {SCHEMA}, not {data['schema']!r}")
    plain = {key: value for key, value in data.items() if key not in (*_TABLES, "override", "measured", "source")}
    found += _wrong_keys("", plain, _KEYS)
    for name, keys in _TABLES.items():
        if name in data:
            found += _wrong_table(name, data[name], keys, _NEEDED.get(name, ("alpha_s", "bytes_per_s")))
    overrides, measured = data.get("override", []), data.get("measured", [])
    for name, tables in (("override", overrides), ("measured", measured)):
        if not isinstance(tables, list):
            return [*found, f"{name}: begin each with [[{name}]], in double brackets"]
    for number, table in enumerate(measured, 1):
        needed = tuple(_MEASURED)[:4]  # the others have defaults
        found += _wrong_table(f"measured {number}", table, _MEASURED, needed)
    for number, table in enumerate(overrides, 1):
        found += _wrong_table(f"override {number}", table, _OVERRIDE, ())
        if isinstance(table, dict) and ("hosts" in table) == ("ranks" in table):
            found.append(f"override {number}: needs hosts = [a, b] or ranks = [a, b], one of them")
    source = data.get("source", {})
    if not isinstance(source, dict) or not all(isinstance(value, str) for value in source.values()):
        found.append('source: a table of texts, by the name of a number such as "inside.alpha_s"')
    return found


def _wrong_table(name: str, table: Any, keys: Mapping[str, str], needed: tuple[str, ...]) -> list[str]:
    if not isinstance(table, dict):
        return [f"{name}: a table, not {table!r}"]
    missing = [f"{name}.{key}: is missing" for key in needed if key not in table]
    return missing + _wrong_keys(f"{name}.", table, keys)


def _wrong_keys(where: str, table: Mapping[str, Any], keys: Mapping[str, str]) -> list[str]:
    found = []
    for key, value in table.items():
        if key not in keys:
            found.append(f"{where}{key}: there is no such key; there are {', '.join(keys)}")
        elif not _CHECKS[keys[key]](value):
            found.append(f"{where}{key}: {keys[key]}, not {value!r}")
    return found


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    _NUMBER: lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    _WHOLE: _is_whole,
    _TEXT: lambda value: isinstance(value, str),
    _FLAG: lambda value: isinstance(value, bool),
    _PAIR: lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_whole, value)),
    _COUNTS: lambda value: _is_whole(value) or _CHECKS[_RANKS](value),
    _RANKS: lambda value: isinstance(value, list) and bool(value) and all(map(_is_whole, value)),
    _FIGURES: lambda value: isinstance(value, list) and all(map(_CHECKS[_NUMBER], value)),
}


def to_toml(topology: Topology, comment: str = "") -> str:
    """Return a topology as TOML that `from_toml` reads; what cannot be said there (`host_rates`) is refused.

    Args:
        topology: What is written.
        comment: Lines above it.

    Raises:
        UsageError: Rates of single hosts are known of it, from a probe: there is no key for them.
    """
    if topology.host_rates:
        raise UsageError(f"{topology.name}: rates of its hosts were probed, and TOML has no key for them")
    per = topology.ranks_per_host
    whole: dict[str, Any] = {
        "schema": SCHEMA,
        "name": topology.name,
        "hosts": topology.hosts,
        "ranks_per_host": per[0] if len(set(per)) == 1 else list(per),
    }
    whole |= {key: value for key in _PLAIN if (value := getattr(topology, key)) is not None}
    tables = [(f"[{name}]", asdict(value)) for name in _TABLES if (value := getattr(topology, name)) is not None]
    for link in topology.overrides:
        pair = {link.of: [link.src, link.dst], "alpha_s": link.alpha_s, "bytes_per_s": link.bytes_per_s}
        tables.append(("[[override]]", pair | {"one_way": True}))
    tables += [("[[measured]]", asdict(times)) for times in topology.measured]
    tables += [("[source]", topology.sources)] if topology.sources else []
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    for heading, table in (("", whole), *tables):
        lines += ["", heading] if heading else []
        # A basic string, a number, a boolean and a list of them are written in TOML as in JSON.
        lines += [
            f"{key if key.isidentifier() else json.dumps(key)} = {json.dumps(value)}"
            for key, value in table.items()
            if value is not None
        ]
    return "\n".join(lines) + "\n"


# -------------------------------------------------------------------------------------------------
# A topology from what `ringside probe` measured.

_ONE_INTERFACE = 1.5  # times what one link carries alone: a host whose links together carry less has one interface
_NO_LIMIT = 1e15  # bytes/s of a link whose time did not grow with the size


def from_probe(data: Any, origin: str = "probe", kind: str = "ethernet") -> Topology:
    """Return the topology that `ringside probe` measured.

    Args:
        data: Its JSON, as plain data: every host, its ranks, and every link between hosts.
        origin: What to call it in errors.
        kind: Of the links between hosts, which a probe cannot find out.

    Raises:
        UsageError: It is something else, or a link was broken.
    """
    try:
        if data["kind"] != "ringside topology" or data["schema"] != SCHEMA:
            raise UsageError(
                f"{origin}: a {data['kind']} of schema {data['schema']}, not a ringside topology of {SCHEMA}"
            )
        ranks = tuple(int(host["ranks"]) for host in data["hosts"])
        links = []
        for link in data["links"]:
            rate = float(link["bytes_per_s"]) if link["bytes_per_s"] is not None else _NO_LIMIT
            links.append(LinkOverride(int(link["src"]), int(link["dst"]), float(link["alpha_s"]), rate, "hosts"))
        sides = ("out_bytes_per_s", "in_bytes_per_s")
        together = [tuple(float(host[side]) for side in sides if host.get(side)) for host in data["hosts"]]
        reduce, overhead_s = data.get("reduce_bytes_per_s"), float(data.get("overhead_s", 0.0))
        reduce = float(reduce) if reduce else None
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{origin}: no ringside topology: {type(error).__name__} {error}") from None
    have = {(link.src, link.dst) for link in links}
    lost = [(a, b) for a in range(len(ranks)) for b in range(len(ranks)) if a != b and (a, b) not in have]
    if lost:
        more = f" and {len(lost) - 1} others" if len(lost) > 1 else ""
        raise UsageError(
            f"{origin}: no link from host {lost[0][0]} to host {lost[0][1]}{more}: it was broken, or not timed"
        )
    known = all(len(rates) == len(sides) for rates in together)
    fastest = max((link.bytes_per_s or 0.0 for link in links), default=1e9)
    least = min((link.alpha_s or 0.0 for link in links), default=0.0)
    several = max(ranks, default=1) > 1
    source = str(data.get("source", "measured by ringside probe"))
    return Topology(
        name=origin,
        ranks_per_host=ranks,
        # A probe times links between hosts only; inside, what `ringside.engine.cost.model` assumes of messages.
        inside=LinkClass("shared_memory", 0.7 * least, 1e9) if several else None,
        between=LinkClass(kind, least, fastest) if links else None,
        reduce_bytes_per_s=reduce,
        overhead_s=overhead_s,
        overrides=tuple(links),
        host_rates=_interfaces(together, links) if known and links else (),
        sources={"between.alpha_s": source, "between.bytes_per_s": source},
    )


def _interfaces(together: list[tuple[float, ...]], links: list[LinkOverride]) -> tuple[tuple[float, float], ...]:
    """Return what every host's links carry together, (out, in) in bytes/s.

    Where that is under 1.5 times what one of them carries alone, they share one interface, and its rate is better known
    from the single link: a probe times all links together for a few messages only, and bursts flatter them.
    """
    found = []
    for host, rates in enumerate(together):
        ends = ([link for link in links if link.src == host], [link for link in links if link.dst == host])
        alone = [median(link.bytes_per_s or 0.0 for link in side) for side in ends]
        sides = zip(rates, alone, strict=True)
        out, into = (min(single, rate) if rate < _ONE_INTERFACE * single else rate for rate, single in sides)
        found.append((float(out), float(into)))
    return tuple(found)


_PRESETS = Path(__file__).parents[1] / "presets"


def presets() -> tuple[str, ...]:
    """Return the names of the topologies that come with Ringside."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.toml")))


def preset(name: str, hosts: int | None = None, ranks_per_host: int | None = None) -> Topology:
    """Return the topology called `name`, with another number of hosts or ranks on each if they are given.

    Raises:
        UsageError: There is no such preset (the message lists them), or a count is below 1.
    """
    if name not in presets():
        raise UsageError(
            f"there is no preset {name!r}{did_you_mean(name, presets())}; there are {', '.join(presets())}"
        )
    found = _preset(name)
    if hosts is None and ranks_per_host is None:
        return found
    return found.sized(found.hosts if hosts is None else hosts, ranks_per_host)


@cache
def _preset(name: str) -> Topology:
    return from_toml((_PRESETS / f"{name}.toml").read_text(encoding="utf-8"), f"preset {name}")


def load_topology(name_or_path: str | Path) -> Topology:
    """Return a preset, or the topology in a file: TOML, or the JSON that `ringside probe -o` writes.

    Raises:
        UsageError: There is neither, or it describes nothing that can be; one line per mistake.
    """
    if str(name_or_path) in presets():
        return preset(str(name_or_path))
    path = Path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        kinds = f"presets are {', '.join(presets())}"
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{name_or_path}: neither a preset nor a topology file ({reason}); {kinds}") from None
    if not text.lstrip().startswith("{"):
        return from_toml(text, str(name_or_path))
    try:
        data = json.loads(text)
    except UNDECODABLE as error:
        raise UsageError(f"{name_or_path}: no JSON: {error}") from None
    return from_probe(data, str(name_or_path))
