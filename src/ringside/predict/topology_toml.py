"""A topology in TOML; one line per mistake. All it can say::

schema = 1
name = "two boxes"
hosts = 2
ranks_per_host = 4              # or one number per host: [4, 2]
nics = 1
rails = "own"                   # or "pooled": a message uses all interfaces of its host
oversubscription = 2.0
hosts_per_leaf = 4
reduce_bytes_per_s = 10e9
overhead_s = 0.0
[inside]                        # between ranks of a host
kind = "pcie"
alpha_s = 2.5e-6
bytes_per_s = 24e9
host_bytes_per_s = 40e9         # what they carry together
[between]                       # between hosts, one interface
kind = "roce"
alpha_s = 4e-6
bytes_per_s = 12e9
[nvls]                          # a switch inside that reduces; [sharp]: between
alpha_s = 6e-6
bytes_per_s = 300e9
[[override]]                    # a link that differs, both ways unless one_way = true
hosts = [0, 1]                  # or ranks = [3, 4]
bytes_per_s = 3e9
[source]
"inside.alpha_s" = "measured"
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from ringside.decoding import UNDECODABLE
from ringside.errors import UsageError
from ringside.predict.topology import LinkClass, LinkOverride, Switch, Topology

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = 1
_NUMBER, _WHOLE, _TEXT, _FLAG = "a number", "a whole number", "text", "true or false"
_LINK = {"kind": _TEXT, "alpha_s": _NUMBER, "bytes_per_s": _NUMBER, "host_bytes_per_s": _NUMBER}
_SWITCH = {"alpha_s": _NUMBER, "bytes_per_s": _NUMBER}
_OVERRIDE = {"hosts": "pair", "ranks": "pair", "alpha_s": _NUMBER, "bytes_per_s": _NUMBER, "one_way": _FLAG}
_KEYS = {
    "schema": _WHOLE,
    "name": _TEXT,
    "hosts": _WHOLE,
    "ranks_per_host": "counts",
    "nics": _WHOLE,
    "rails": _TEXT,
    "oversubscription": _NUMBER,
    "hosts_per_leaf": _WHOLE,
    "reduce_bytes_per_s": _NUMBER,
    "overhead_s": _NUMBER,
}
_TABLES = {"inside": _LINK, "between": _LINK, "nvls": _SWITCH, "sharp": _SWITCH}
_NEEDED = {"inside": ("kind", "alpha_s", "bytes_per_s"), "between": ("kind", "alpha_s", "bytes_per_s")}


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
    return _built(data, origin)


def _mistakes(data: Mapping[str, Any]) -> list[str]:
    found = [f"{key}: is missing" for key in ("schema", "hosts", "ranks_per_host") if key not in data]
    if data.get("schema", SCHEMA) != SCHEMA:
        found.append(f"schema: this is read as {SCHEMA}, not {data['schema']!r}")
    plain = {key: value for key, value in data.items() if key not in (*_TABLES, "override", "source")}
    found += _wrong_keys("", plain, _KEYS)
    for name, keys in _TABLES.items():
        if name in data:
            found += _wrong_table(name, data[name], keys, _NEEDED.get(name, ("alpha_s", "bytes_per_s")))
    overrides = data.get("override", [])
    if not isinstance(overrides, list):
        return [*found, "override: begin each with [[override]], in double brackets"]
    for at, one in enumerate(overrides):
        found += _wrong_table(f"override {at + 1}", one, _OVERRIDE, ())
        if isinstance(one, dict) and ("hosts" in one) == ("ranks" in one):
            found.append(f"override {at + 1}: needs hosts = [a, b] or ranks = [a, b], one of them")
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
            found.append(f"{where}{key}: {_WORDS.get(keys[key], keys[key])}, not {value!r}")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    _NUMBER: _is_number,
    _WHOLE: _is_whole,
    _TEXT: lambda value: isinstance(value, str),
    _FLAG: lambda value: isinstance(value, bool),
    "pair": lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_whole, value)),
    "counts": lambda value: (
        _is_whole(value) or (isinstance(value, list) and bool(value) and all(map(_is_whole, value)))
    ),
}
_WORDS = {"pair": "two whole numbers such as [0, 1]", "counts": "a whole number, or one for every host"}


def _built(data: Mapping[str, Any], origin: str) -> Topology:
    per = data["ranks_per_host"]
    if isinstance(per, list) and len(per) != data["hosts"]:
        raise UsageError(f"{origin}: ranks_per_host: {data['hosts']} numbers, one for every host, not {len(per)}")
    tables: dict[str, Any] = {}
    for name in _TABLES:
        if name in data:
            make = LinkClass if name in _NEEDED else Switch
            try:
                tables[name] = make(**data[name])
            except UsageError as error:
                raise UsageError("\n".join(f"{origin}: {name}.{line}" for line in str(error).splitlines())) from None
    simple = {
        key: data[key] for key in _KEYS if key in data and key not in ("schema", "name", "hosts", "ranks_per_host")
    }
    return Topology(
        name=data.get("name", origin),
        ranks_per_host=tuple(per) if isinstance(per, list) else (per,) * max(data["hosts"], 0),
        overrides=tuple(link for one in data.get("override", []) for link in _overrides(one)),
        sources=dict(data.get("source", {})),
        **simple,
        **tables,
    )


def _overrides(one: Mapping[str, Any]) -> list[LinkOverride]:
    of = "hosts" if "hosts" in one else "ranks"
    a, b = one[of]
    pairs = [(a, b)] if one.get("one_way", False) else [(a, b), (b, a)]
    return [LinkOverride(src, dst, one.get("alpha_s"), one.get("bytes_per_s"), of) for src, dst in pairs]
