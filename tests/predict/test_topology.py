"""Topologies: what presets say and from where, what a file may say, and what cannot be."""

import dataclasses
import json
import re
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from ringside.engine.cost.network import CostNetwork
from ringside.errors import UsageError
from ringside.predict import (
    LinkClass,
    LinkOverride,
    Switch,
    Topology,
    from_probe,
    from_toml,
    load_topology,
    preset,
    presets,
)
from ringside.predict.topology.files import to_toml

from .shared_tables import published
from .written_topologies import BOXES

WANTED = "dgx-a100 dgx-h100 dgx-h200 dgx-b200 gb200-nvl72 p4de p5 pcie-box ethernet-10g ethernet-100g loopback"
NVLINK = LinkClass("nvlink", 2e-6, 300e9)
WIRE = LinkClass("ethernet", 2e-5, 1e9)

SOURCE = re.compile(
    r"https://\w+\.\w|datasheet: |instances page: |reference design"  # what its makers say
    r"|\w\.csv\b|measured with torch \d"  # what was measured
    r"|IEEE \d{3}"
    r"|^estimate: |say otherwise$|^no other host is reached$"  # what nobody says, and is said to be so
)
"""Somebody who can be asked, or a word that there is nobody."""
TABLE = re.compile(r"\w+\.csv\b")


def sourced_figures(topology: Topology) -> dict[str, Any]:
    """Return every number of a topology that needs a source, by its name such as `inside.alpha_s`."""
    found: dict[str, Any] = {}
    for part in ("inside", "between", "nvls", "sharp"):
        value = getattr(topology, part)
        if value is not None:
            named = {f"{part}.{part_field.name}": getattr(value, part_field.name) for part_field in fields(value)}
            found |= {name: number for name, number in named.items() if isinstance(number, int | float)}
    found |= {"ranks_per_host": topology.ranks_per_host[0], "nics": topology.nics}
    if topology.reduce_bytes_per_s is not None:
        found["reduce_bytes_per_s"] = topology.reduce_bytes_per_s
    return found


def test_every_preset_is_there():
    assert set(presets()) == set(WANTED.split())


@pytest.mark.parametrize("name", WANTED.split())
def test_every_number_of_a_preset_says_where_it_is_from(name):
    topology = preset(name)
    assert set(topology.sources) == set(sourced_figures(topology))
    for source in topology.sources.values():
        assert SOURCE.search(source), source
        assert all(published(table).exists() for table in TABLE.findall(source)), source


def test_a_preset_at_another_scale():
    topology = preset("dgx-h100", hosts=16)
    assert (topology.hosts, topology.ranks, topology.nics) == (16, 128, 8)
    assert topology.describe() == (
        "dgx-h100: 16 hosts of 8 ranks, inside nvswitch 370.8 GB/s, between 8 × infiniband 48 GB/s"
    )
    assert preset("dgx-h100", hosts=2, ranks_per_host=2).nics == 2
    assert preset("gb200-nvl72", hosts=1, ranks_per_host=64).ranks == 64


def test_a_file_is_read():
    topology = from_toml(BOXES)
    assert topology.ranks_per_host == (4, 2)
    assert topology.host_of.tolist() == [0, 0, 0, 0, 1, 1]
    assert topology.nic_of.tolist() == [0, 0, 1, 1, 2, 3]
    assert topology.rate_of(0, 5) == 3e9
    assert topology.rate_of(5, 0) == 3e9
    assert topology.rate_of(1, 2) == 24e9
    assert len(topology.overrides) == 3
    assert not topology.even
    assert topology.class_of(0, 3) == "pcie"
    assert topology.class_of(0, 4) == "roce"


def test_every_mistake_of_a_file_has_a_line():
    text = """
    hosts = 0
    ranks_per_host = "many"
    speed = 3
    [inside]
    kind = "nvlink"
    alpha_s = "fast"
    [[override]]
    ranks = [1]
    hosts = [0, 1]
    """
    with pytest.raises(UsageError) as caught:
        from_toml(text, "my.toml")
    lines = str(caught.value).splitlines()
    assert all(line.startswith("my.toml: ") for line in lines)
    for part in (
        "schema: is missing",
        "ranks_per_host: a whole number, or one for every host, not 'many'",
        "speed: there is no such key",
        "inside.bytes_per_s: is missing",
        "inside.alpha_s: a number, not 'fast'",
        "override 1.ranks: two whole numbers such as [0, 1], not [1]",
        "override 1: needs hosts = [a, b] or ranks = [a, b], one of them",
    ):
        assert sum(part in line for line in lines) == 1, (part, lines)


MEASURED = "ranks_per_host = [2, 1]\nnics = 1\nsizes_bytes = [8]\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("hosts = 2", "hosts = 3"), "ranks_per_host: 3 numbers, one for every host, not 2"),
        (("bytes_per_s = 24e9", "bytes_per_s = 0"), "inside.bytes_per_s: bytes per second, at least 1e-06, not 0"),
        (("bytes_per_s = 24e9", "bytes_per_s = inf"), "inside.bytes_per_s"),
        (('kind = "pcie"', 'kind = "wool"'), "inside.kind 'wool': there are nvlink, nvswitch"),
        (("nics = 2", "nics = 0"), "nics: at least 1, not 0"),
        (("ranks_per_host = [4, 2]", "ranks_per_host = [4, 0]"), "ranks_per_host: at least 1 on every host, not 0"),
        (("oversubscription = 2.0", "oversubscription = 0.5"), "oversubscription: at least 1"),
        (("ranks = [1, 2]", "ranks = [1, 6]"), "override ranks 1 > 6: two different ranks of 0 to 5"),
        (('rails = "own"', 'rails = "mine"'), "rails 'mine': pooled or own"),
        (("schema = 1", "schema = ["), "no TOML"),
        (("schema = 1", "schema = 2"), "schema: this is read as 1, not 2"),
        (("hosts = 2", "hosts = 1_000_001"), "hosts: at most 1,000,000, not 1000001"),
        (('name = "boxes"', "measured = 3"), "measured: begin each with [[measured]], in double brackets"),
        (("[inside]", "sharp = 7\n[inside]"), "sharp: a table, not 7"),
        (("[inside]", "[sharp]\nalpha_s = 1e-6\n[inside]"), "sharp.bytes_per_s: is missing"),
        (("[inside]", "[source]\nx = 1\n[inside]"), "source: a table of texts, by the name of a number"),
        (("ranks = [1, 2]", "ranks = [true, 2]"), "override 2.ranks: two whole numbers such as [0, 1], not [True, 2]"),
        (("one_way = true", "one_way = 1"), "override 2.one_way: true or false, not 1"),
        (("ranks_per_host = [4, 2]", "ranks_per_host = []"), "ranks_per_host: a whole number, or one for every host"),
        (("nics = 2", "nics = 2.0"), "nics: a whole number, not 2.0"),
        (("oversubscription = 2.0", "oversubscription = true"), "oversubscription: a number, not True"),
        (("[inside]", f"[[measured]]\n{MEASURED}\n[inside]"), "measured 1.times_s: is missing"),
        (("[inside]", f"[[measured]]\n{MEASURED}times_s = [1, 2]\n[inside]"), "at least 1, not 1 and 2"),
        (
            ("[inside]", f"[[measured]]\n{MEASURED}times_s = [0]\n[inside]"),
            "measured 1.sizes_bytes and times_s: numbers",
        ),
        (
            ("[inside]", f"[[measured]]\n{MEASURED.replace('[2, 1]', '[1]')}times_s = [1]\n[inside]"),
            "measured 1.ranks_per_host: two ranks or more, not [1]",
        ),
        (
            ("[inside]", f"[[measured]]\n{MEASURED.replace('nics = 1', 'nics = 0')}times_s = [1]\n[inside]"),
            "measured 1.nics: at least 1, not 0",
        ),
    ],
)
def test_impossible_topologies_are_refused(change, words):
    with pytest.raises(UsageError) as caught:
        from_toml(BOXES.replace(*change), "boxes.toml")
    assert words in str(caught.value)
    assert "boxes" in str(caught.value)


def test_a_rank_without_a_link_is_refused():
    with pytest.raises(UsageError, match="between: 2 hosts and no network that joins them"):
        Topology("x", (1, 1))
    with pytest.raises(UsageError, match="inside: hosts with several ranks"):
        Topology("x", (2, 1), between=WIRE)
    with pytest.raises(UsageError, match="hosts: at least 1, not 0"):
        Topology("x", ())
    assert Topology("alone", (1,)).ranks == 1


def test_counts_have_bounds_of_their_own():
    wire = LinkClass("ethernet", 1e-5, 1e9)
    assert Topology("x", (1 << 23, 1 << 23), wire, wire).ranks == 1 << 24
    with pytest.raises(UsageError, match=r"16777217 ranks: at most 16777216"):
        Topology("x", (1 << 23, (1 << 23) + 1), wire, wire)
    with pytest.raises(UsageError, match=r"host_rates: one \(out, in\) for each of 2 hosts, not 1"):
        Topology("x", (2, 2), wire, wire, host_rates=((1e9, 1e9),))
    with pytest.raises(UsageError, match=r"3 hosts need 3 numbers of ranks, not \[2, 2\]"):
        preset("dgx-h100").sized(3, [2, 2])
    for sizes, nics in ((8, 8), (4, 4), (3, 3), (16, 8), (1, 1), ([8, 2], 8), ([2, 1], 2)):
        assert preset("dgx-h100").sized(2, sizes).nics == nics  # as many as its ranks have by right
    for sizes, nics in ((72, 8), (1, 1), (9, 1), (10, 2)):
        assert dataclasses.replace(preset("gb200-nvl72"), nics=8).sized(2, sizes).nics == nics


def test_several_mistakes_are_all_named():
    with pytest.raises(UsageError) as caught:
        Topology("x", (2, 2), nics=0, oversubscription=float("nan"))
    assert len(str(caught.value).splitlines()) == 4


def test_nothing_of_that_name():
    with pytest.raises(UsageError, match="presets are dgx-a100"):
        load_topology("dgx-h1000")
    with pytest.raises(UsageError, match="there is no preset 'x'"):
        preset("x")
    assert load_topology("p5").ranks == 16


def test_a_file_is_toml_or_a_probes_json(tmp_path):
    path = tmp_path / "boxes.toml"
    path.write_text(BOXES)
    assert load_topology(path) == from_toml(BOXES)
    path.write_text("\n { ")
    with pytest.raises(UsageError, match=r"boxes.toml: no JSON"):
        load_topology(path)
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"neither a preset nor a topology file \(it is no text\)"):
        load_topology(path)


def test_what_the_probe_writes_is_a_topology(tmp_path):
    latency = np.array([[0, 2e-5, 3e-5], [2e-5, 0, 4e-5], [3e-5, 4e-5, 0]])
    per_byte = np.array([[0, 1e-8, 1e-8], [1e-8, 0, 4e-8], [1e-8, 2e-8, 0]])
    nic = np.array([1e-8, 1e-8, 2e-8])
    network = CostNetwork(latency, per_byte, nic, nic, reduce=1e-10, overhead_s=1e-6)
    path = tmp_path / "topology.json"
    path.write_text(json.dumps(network.to_topology(["a", "b", "c"], [2, 1, 1], "measured")))
    topology = load_topology(path)
    assert topology.ranks_per_host == (2, 1, 1)
    assert topology.rate_of(2, 3) == pytest.approx(25e6)
    assert topology.rate_of(3, 2) == pytest.approx(50e6)
    assert topology.host_rates[0] == pytest.approx((1e8, 1e8))
    assert topology.host_rates[2] == pytest.approx((50e6, 50e6))
    assert topology.overhead_s == 1e-6
    assert topology.reduce_bytes_per_s == pytest.approx(1e10)
    data = json.loads(path.read_text())
    data["hosts"][0]["out_bytes_per_s"] = 1.9e8  # two interfaces
    assert from_probe(data).host_rates[0] == pytest.approx((1.9e8, 1e8))
    data["hosts"][0]["out_bytes_per_s"] = 1.3e8  # one, and a burst
    assert from_probe(data).host_rates[0] == pytest.approx((1e8, 1e8))
    data["links"].pop()
    with pytest.raises(UsageError, match="no link from host 2 to host 1"):
        from_probe(data)
    with pytest.raises(UsageError, match="it was broken, or not timed"):
        from_probe(data)
    lost = {**data, "links": data["links"][:-2]}
    with pytest.raises(UsageError, match=f"no link from host 1 to host 2 and {6 - len(lost['links']) - 1} others"):
        from_probe(lost)
    for key, value in (("kind", "probe"), ("schema", 2)):
        with pytest.raises(UsageError, match="not a ringside topology of 1"):
            from_probe({**data, key: value})
    with pytest.raises(UsageError, match="rates of its hosts were probed"):
        to_toml(topology)
    with pytest.raises(UsageError, match="no ringside topology"):
        from_probe({"kind": "ringside topology", "schema": 1})
    path.write_text("{")
    with pytest.raises(UsageError, match="no JSON"):
        load_topology(path)


def test_what_if_changes():
    topology = preset("dgx-h100", hosts=4)
    slow = topology.with_slow_link(7, 8, 4.0)
    assert slow.rate_of(7, 8) == topology.rate_of(7, 8) / 4
    assert slow.rate_of(8, 7) == topology.rate_of(8, 7)
    assert slow.with_slow_link(7, 8, 2.0).rate_of(7, 8) == topology.rate_of(7, 8) / 8
    lost = topology.without_rail(1)
    assert lost.host_rates[1] == pytest.approx((7 * 48e9, 7 * 48e9))
    assert lost.host_rates[0] == pytest.approx((8 * 48e9, 8 * 48e9))
    with pytest.raises(UsageError, match="nothing reaches it"):
        preset("ethernet-10g").without_rail(0)
    with pytest.raises(UsageError, match="no pooled rail"):
        topology.without_rail(9)
    with pytest.raises(UsageError, match="times slower"):
        topology.with_slow_link(0, 1, 0.0)


def test_values():
    assert preset("p5") == load_topology("p5")
    with pytest.raises(UsageError, match="alpha_s: seconds, 0 or more, not -1"):
        Switch(-1.0, 1e9)
    with pytest.raises(UsageError, match="of ranks or hosts"):
        Topology("x", (2,), NVLINK, overrides=(LinkOverride(0, 1, of="rails"),))
