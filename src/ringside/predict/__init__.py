"""What collectives cost on hardware that is described, not owned: topologies, closed forms, simulation. Pure NumPy.

`preset("dgx-h100", hosts=16)` is a `Topology`; `price(ring(128), topology, 1e9)` is seconds.
"""

from ringside.predict.closed_form import closed_form
from ringside.predict.price import price, prices
from ringside.predict.simulate import finish_seconds, simulate
from ringside.predict.timeline import Timeline
from ringside.predict.timeline_path import Guilty, Hop, Sent
from ringside.predict.topology import KINDS, LinkClass, LinkOverride, Switch, Topology
from ringside.predict.topology_read import from_probe, from_toml, load_topology, preset, presets

__all__ = [
    "KINDS",
    "Guilty",
    "Hop",
    "LinkClass",
    "LinkOverride",
    "Sent",
    "Switch",
    "Timeline",
    "Topology",
    "closed_form",
    "finish_seconds",
    "from_probe",
    "from_toml",
    "load_topology",
    "preset",
    "presets",
    "price",
    "prices",
    "simulate",
]
