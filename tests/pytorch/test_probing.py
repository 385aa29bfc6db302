"""The probe of a job's links, on ranks that pretend to be on hosts of their own."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.support.ranks import on_ranks, place  # noqa: E402

from ringside.engine.net.rank_map import RankInfo, RankMap, make_rank_map, own_rank_info  # noqa: E402
from ringside.engine.probe.links import MeasuredSlowLink  # noqa: E402
from ringside.engine.tuner.explain import AlgorithmChange  # noqa: E402
from ringside.errors import UsageError  # noqa: E402
from ringside.pytorch import job_probe as probing  # noqa: E402
from ringside.pytorch.communicator.between_hosts import record_algorithm_change  # noqa: E402
from ringside.pytorch.job_probe import ProbeOutcome, probe_job  # noqa: E402
from ringside.pytorch.recording import session as sessions  # noqa: E402

from .training import free_port  # noqa: E402


def machine_of(machines: str) -> Any:
    """Return what stands for `own_rank_info` where each rank is on the machine of its letter."""

    def offer(settings: dict[str, str], machine: str = "") -> RankInfo:
        return own_rank_info(settings, machine=machine or f"machine {machines[place().rank]}")

    return offer


def probes(port: int, machines: str, **how: Any) -> ProbeOutcome:
    os.environ["MASTER_PORT"] = str(port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probing, "own_rank_info", machine_of(machines))
        return probe_job(thorough=False, **how)


def every_rank(port: int, machines: str) -> Any:
    return probes(port, machines, every_rank=True)


def hosts_in_an_order(port: int, machines: str) -> Any:
    return probes(port, machines, order=(0, 2, 1))


def test_every_link_between_hosts_is_timed_and_rings_besides() -> None:
    found = on_ranks(4, hosts_in_an_order, free_port(), "aabc")
    name = probing.socket.gethostname()
    for rank, outcome in enumerate(found):
        assert (outcome.rank, outcome.size, outcome.ranks) == (rank, 4, (2, 1, 1))
        assert len(outcome.names) == 3
        assert all(name in one for one in outcome.names)
        assert (outcome.broken, outcome.missing, outcome.trouble) == ((), (), "")
        assert outcome.probe is not None
        assert outcome.probe.network.rates.shape == (3, 3)
        assert {(0, 1, 2), (0, 2, 1)} <= outcome.ring_s.keys()
        assert all(0 < seconds < 60 for seconds in outcome.ring_s.values())
        assert outcome.fine is (outcome.slow == [])


def test_on_one_host_and_where_it_is_asked_for_links_between_ranks_are_timed() -> None:
    for machines in ("aa", "ab"):
        for rank, outcome in enumerate(on_ranks(2, every_rank, free_port(), machines)):
            assert (outcome.rank, outcome.ranks, outcome.trouble) == (rank, (1, 1), "")
            assert [one.rpartition("/")[2] for one in outcome.names] == ["rank0", "rank1"]
            assert outcome.probe is not None


def alone_of_three(port: int) -> Any:
    os.environ["MASTER_PORT"] = str(port)
    os.environ["WORLD_SIZE"] = "3"
    return probe_job(thorough=False, patience_s=0.4)


def test_ranks_that_do_not_come_are_named() -> None:
    (outcome,) = on_ranks(1, alone_of_three, free_port())
    assert outcome == ProbeOutcome(0, 3, missing=(1, 2))
    assert not outcome.fine
    assert outcome.slow == []


def cut_off(port: int, machines: str, wall: int) -> Any:
    """Nothing comes through between the first host and that of number `wall`."""

    def unreachable(others: Any, limit_s: float) -> list[int]:
        return [v for v in others if place().rank == 0 and v == wall]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probing, "unreachable", unreachable)
        return probes(port, machines)


def test_links_that_carry_nothing_are_named_from_both_ends_and_nothing_is_timed() -> None:
    for outcome in on_ranks(3, cut_off, free_port(), "abc", 2):
        assert outcome.broken == ((0, 2),)
        assert outcome.probe is None
        assert len(outcome.names) == 3


def far_apart(port: int, machines: str) -> Any:
    """An answer takes the first host's rank a while; what it waits for at most is told in place of any timing."""

    def unreachable(others: Any, limit_s: float) -> list[int]:
        time.sleep(0.1 if place().rank == 0 else 0.0)
        return []

    def refuses(*_: Any, timeout_s: float) -> Any:
        raise RuntimeError(str(timeout_s))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probing, "unreachable", unreachable)
        patch.setattr(probing, "GlooTransport", refuses)
        return probes(port, machines)


def test_over_long_links_who_has_nothing_to_time_waits_longer_for_the_others() -> None:
    first, second = (float(outcome.trouble) for outcome in on_ranks(2, far_apart, free_port(), "ab"))
    assert first == second >= 5.0 + 60 * 0.1 / 2


def breaks_while_timed(port: int, machines: str) -> Any:
    def fails(self: Any) -> Any:
        raise RuntimeError("connection reset\nby somebody")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probing.Prober, "probe", fails)
        return probes(port, machines)


def test_what_fails_while_links_are_timed_is_told_in_one_line() -> None:
    for outcome in on_ranks(2, breaks_while_timed, free_port(), "ab"):
        assert (outcome.trouble, outcome.broken, outcome.probe) == ("connection reset", (), None)


def nowhere(port: int) -> Any:
    os.environ.update(MASTER_PORT=str(port), RANK="1", WORLD_SIZE="2")
    return probe_job(patience_s=0.05)


def test_a_rank_that_does_not_reach_rank_0_says_so() -> None:
    port = free_port()
    (outcome,) = on_ranks(1, nowhere, port)
    assert (outcome.rank, outcome.size) == (1, 2)
    assert outcome.trouble.endswith(f"(rank 1) does not reach rank 0 at 127.0.0.1:{port}")


def wrong_order(port: int, machines: str) -> str:
    with pytest.raises(UsageError) as raised:
        probes(port, machines, order=(0, 0))
    return str(raised.value)


def test_what_cannot_be_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_ranks(2, wrong_order, free_port(), "ab") == ["--order names each of 0 to 1 once, not [0, 0]"] * 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UsageError, match="no links among 1 ranks: start at least 2"):
        probe_job()


def test_whoever_launched_the_job_may_have_made_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    environment = {"MASTER_ADDR": "node-0", "MASTER_PORT": "7", "TORCHELASTIC_RESTART_COUNT": "2", "WORLD_SIZE": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def lost(part: str, _: Any) -> Any:
        raise RuntimeError(parts.append(part))

    parts: list[str] = []
    monkeypatch.setattr(probing, "TCPStore", lambda *words, **how: given.append(words))
    monkeypatch.setattr(probing, "PrefixStore", lost)
    for rank, agent, makes in (("0", "", True), ("1", "", False), ("0", "True", False)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
        assert probe_job(patience_s=4.0).trouble.endswith(f" (rank {rank}) does not reach rank 0 at node-0:7")
        assert given[-1][:4] == ("node-0", 7, None, makes)
        assert given[-1][4].total_seconds() == 4.0
        assert parts[-1] == "ringside/probe/2"


# ------------------------------------------------------------------------------------------------ what is decided anew

ROSTER = RankMap(1, ((0, 1), (2, 3)), ("node-0", "node-1"), ("k0", "k1"))
REVISED = AlgorithmChange(
    4096, "ring", "tree", True, "slow", (MeasuredSlowLink(0, 1, 1e6, 9e6), MeasuredSlowLink(1, -1, 2e6, 9e6)), "", 0.5
)


def test_a_session_of_the_same_ranks_records_a_revision_whose_links_are_named_by_first_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[dict[str, Any]] = []

    class Session:
        size = 4
        clock = SimpleNamespace(step=7)

        def put_event(self, kind: str, fields: dict[str, Any]) -> None:
            told.append({"kind": kind, **fields})

    record_algorithm_change(ROSTER, REVISED)  # there is none
    monkeypatch.setattr(sessions, "current", Session)
    record_algorithm_change(make_rank_map(0, [own_rank_info({}) for _ in range(2)]), REVISED)
    assert told == []
    record_algorithm_change(ROSTER, REVISED)
    assert told == [
        {
            "kind": "revised", "step": 7,
            "size_bytes": 4096, "before": "ring", "after": "tree", "others_changed": True, "reason": "slow",
            "links": [
                {"ranks": [0, 2], "hosts": ["node-0", "node-1"], "bytes_per_s": 1e6, "usual_bytes_per_s": 9e6},
                {"ranks": [2], "hosts": ["node-1"], "bytes_per_s": 2e6, "usual_bytes_per_s": 9e6},
            ],
            "seconds": 0.5,
        }
    ]  # fmt: skip
