"""What collectives cost on hardware that is described, not owned: topologies, closed forms, simulation. Pure NumPy.

`preset("dgx-h100", hosts=16)` is a `Topology`; `price(ring(128), topology, 1e9)` is seconds.
"""

from ringside.predict.simulation.closed_form import closed_form
from ringside.predict.simulation.simulate import finish_seconds, price, prices, simulate
from ringside.predict.simulation.timeline import Culprit, PathHop, SentMessages, Timeline
from ringside.predict.topology.files import from_probe, from_toml, load_topology, preset, presets, to_toml
from ringside.predict.topology.topology import LINK_KINDS, LinkClass, LinkOverride, MeasuredTimes, Switch, Topology

__all__ = [
    "LINK_KINDS", "Culprit", "LinkClass", "LinkOverride", "MeasuredTimes", "PathHop", "SentMessages", "Switch",
    "Timeline", "Topology", "closed_form", "finish_seconds", "from_probe", "from_toml", "load_topology",
    "preset", "presets", "price", "prices", "simulate", "to_toml",
]  # fmt: skip
