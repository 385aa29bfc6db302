"""A topology from a preset's name, a TOML file, or what `ringside probe` wrote."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path

from ringside.decoding import UNDECODABLE
from ringside.errors import UsageError
from ringside.predict.topology import Topology
from ringside.predict.topology_probe import from_probe
from ringside.predict.topology_toml import from_toml

__all__ = ["from_probe", "from_toml", "load_topology", "preset", "presets"]


def presets() -> tuple[str, ...]:
    """Return the names of the topologies that come with Ringside."""
    folder = files("ringside.predict").joinpath("presets")
    return tuple(sorted(one.name.removesuffix(".toml") for one in folder.iterdir() if one.name.endswith(".toml")))


def preset(name: str, hosts: int | None = None, ranks_per_host: int | None = None) -> Topology:
    """Return the topology called `name`, with another number of hosts or ranks on each if they are given.

    Raises:
        UsageError: There is no such preset (the message lists them), or a count is below 1.
    """
    if name not in presets():
        raise UsageError(f"there is no preset {name!r}; there are {', '.join(presets())}")
    found = _preset(name)
    if hosts is None and ranks_per_host is None:
        return found
    return found.sized(found.hosts if hosts is None else hosts, ranks_per_host)


@cache
def _preset(name: str) -> Topology:
    text = files("ringside.predict").joinpath("presets").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return from_toml(text, f"preset {name}")


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
