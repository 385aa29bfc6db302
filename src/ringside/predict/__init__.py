"""What collectives cost on hardware that is described, not owned: topologies, closed forms, simulation. Pure NumPy.

`preset("dgx-h100", hosts=16)` is a `Topology`; `price(ring(128), topology, 1e9)` is seconds.
"""

from ringside.predict.topology import KINDS, LinkClass, LinkOverride, Switch, Topology
from ringside.predict.topology_read import from_probe, from_toml, load_topology, preset, presets

__all__ = [
    "KINDS",
    "LinkClass",
    "LinkOverride",
    "Switch",
    "Topology",
    "from_probe",
    "from_toml",
    "load_topology",
    "preset",
    "presets",
]
