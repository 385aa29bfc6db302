from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ringside.doctor import Findings, examine
from ringside.doctor.nccl_log.communicators import Communicators, NcclCommunicator, ring_order, transport_name
from ringside.doctor.nccl_log.lines import Line, nccl_lines
from ringside.doctor.nccl_log.settings import NcclNetwork, NcclSettings, judge_settings

from .nccl_logs import BUS_IDS_2_10, OLD_2_4, hosts_of, job_log, log_of_rank


def look_at(tmp_path: Path, text: str) -> Findings:
    (tmp_path / "job.log").write_text(text)
    return examine([tmp_path / "job.log"])


def kinds(found: Findings) -> list[tuple[str, list[int]]]:
    return [(verdict.kind, verdict.ranks) for verdict in found.verdicts]


def test_a_healthy_job_of_two_hosts_in_one_file(tmp_path: Path) -> None:
    found = look_at(tmp_path, job_log([4, 4]))
    assert found.verdicts == []
    assert found.unjudged == []
    (drawing,) = found.rings
    assert [hop.dst for hop in drawing.rings[0]] == [1, 2, 3, 4, 5, 6, 7, 0]
    assert [hop.between_hosts for hop in drawing.rings[0]] == [False, False, False, True] * 2
    assert {hop.via for hop in drawing.rings[1]} == {"P2P", "NET/IB GDRDMA"}
    assert [(hop.src, hop.dst) for hop in drawing.trees[0]] == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3)]
    assert found.questions["network_between_hosts"].numbers == {"NET/IB GDRDMA": 4}


def test_logs_of_ranks_in_files_of_their_own_are_put_together(tmp_path: Path) -> None:
    places = hosts_of([2, 2])
    for rank in range(4):
        (tmp_path / f"rank{rank}.log").write_text("\n".join(log_of_rank(rank, places)))
    found = examine([tmp_path])
    assert found.verdicts == []
    assert len(found.rings[0].rings[0]) == 4


@pytest.mark.parametrize(
    "dress",
    [
        lambda line: f"[1,0]<stdout>:{line}",
        lambda line: f"2024-12-10T18:28:00.405Z {line}",
        lambda line: f"(RayWorkerWrapper pid=927) {line}",
        lambda line: f"[rank0]: {line}",
        lambda line: f"\rEpoch 1:  3%| 1/64 [00:01<01:02]{line}",
    ],
)
def test_what_launchers_put_before_a_line_does_not_matter(tmp_path: Path, dress: object) -> None:
    text = job_log([2, 2], order=[0, 2, 1, 3])
    found = look_at(tmp_path, "\n".join(dress(line) for line in text.splitlines()))  # type: ignore[operator]
    assert kinds(found) == [("broken_ring", [])]


def test_two_messages_in_one_line_are_both_read() -> None:
    text = "a:1:2 [0] NCCL INFO Connected all ringsb:3:4 [1] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"
    assert [(line.pid, line.text) for line in nccl_lines(text, 1, {"a", "b"})] == [
        (1, "Connected all rings"),
        (3, "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"),
    ]


@pytest.mark.parametrize(
    ("via", "nvlink", "name"),
    [
        ("P2P/CUMEM", True, "NVLink P2P"),
        ("P2P/IPC/read", False, "PCIe P2P"),
        ("P2P/direct pointer", None, "P2P"),
        ("SHM/direct/direct", None, "SHM"),
        ("direct shared memory", None, "SHM"),
        ("NET/IB/0/GDRDMA", None, "NET/IB GDRDMA"),
        ("NET/IBext_v8/3(2)/GDRDMA/Shared", None, "NET/IBext_v8 GDRDMA"),
        ("NET/AWS Libfabric/0", None, "NET/AWS Libfabric"),
        ("NET/Socket/0", None, "NET/Socket"),
    ],
)
def test_transports_in_the_words_of_nccl(via: str, nvlink: bool | None, name: str) -> None:
    assert transport_name(via, nvlink=nvlink) == name


def test_nvlink_is_known_from_the_topology_search(tmp_path: Path) -> None:
    extra = ["Pattern 4, crossNic 0, nChannels 12, bw 20.000000/20.000000, type NVL/PIX, sameChannels 1"]
    found = look_at(tmp_path, job_log([2], extra=extra))
    assert {hop.via for hop in found.rings[0].rings[0]} == {"NVLink P2P"}


def test_a_ring_that_crosses_hosts_more_often_than_needed(tmp_path: Path) -> None:
    (verdict,) = look_at(tmp_path, job_log([2, 2], order=[0, 2, 1, 3])).verdicts
    assert (verdict.kind, verdict.evidence["what"]) == ("broken_ring", "crosses hosts")
    assert (verdict.evidence["crossings"], verdict.evidence["needed"]) == (4, 2)


def test_a_hop_that_was_never_connected(tmp_path: Path) -> None:
    lines = [line for line in job_log([4]).splitlines() if "Channel 01/0 : 2[2] -> 3[3]" not in line]
    found = look_at(tmp_path, "\n".join(lines))
    assert kinds(found) == [("broken_ring", [2, 3])]
    assert [hop.wrong for hop in found.rings[0].rings[1]] == ["", "", "never connected", ""]


def test_a_ring_without_a_rank(tmp_path: Path) -> None:
    text = job_log([4]).replace("Channel 00/02 :  0  1  2  3", "Channel 00/02 :  0  1  3")
    assert kinds(look_at(tmp_path, text)) == [("broken_ring", [2])]


def test_neighbours_that_do_not_agree(tmp_path: Path) -> None:
    rings = {0: "3 -> 0 -> 1", 1: "0 -> 1 -> 3", 2: "1 -> 2 -> 3", 3: "2 -> 3 -> 0"}
    text = "\n".join(
        f"a:{rank}:{rank} [{rank}] NCCL INFO {line}"
        for rank in range(4)
        for line in (
            f"comm 0x{rank}f rank {rank} nranks 4 cudaDev {rank} busId 1 - Init START",
            f"Ring 00 : {rings[rank]}",
        )
    ).replace("Init START", "Init COMPLETE")
    found = look_at(tmp_path, text)
    assert kinds(found) == [("broken_ring", [1, 3])]
    assert "receives from rank 2" in found.verdicts[0].cause


def test_sockets_though_others_use_infiniband(tmp_path: Path) -> None:
    text = job_log([2, 2, 2], lambda rank: {"network": "NET/Socket/0"} if rank in (3, 4) else {})
    (verdict,) = look_at(tmp_path, text).verdicts
    assert (verdict.kind, verdict.ranks, verdict.evidence["what"]) == ("broken_ring", [3, 4], "sockets")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("NCCL_IB_HCA set by environment to mlx5_0.", "NCCL_IB_HCA=mlx5_0"),
        ("NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>", "node-0 has a better network"),
        ("Failed to open libibverbs.so[.1]", "libibverbs"),
        ("NCCL_IB_DISABLE set by environment to 1.", "NCCL_IB_DISABLE=1"),
        ("NET/IB : No device found.", "found no device (node-0, node-1)"),
    ],
)
def test_a_fallback_to_sockets_says_why(tmp_path: Path, line: str, reason: str) -> None:
    text = "\n".join(f"node-{rank // 2}:{1000 + rank}:{1000 + rank} [0] NCCL INFO {line}" for rank in range(4))
    found = look_at(tmp_path, text + "\n" + job_log([2, 2], network="NET/Socket/0"))
    assert kinds(found) == [("broken_ring", [])]
    assert reason in str(found.verdicts[0].evidence["reason"])


@pytest.mark.parametrize("line", ["NCCL_NET set by environment to Socket.", "Using eth0"])
def test_sockets_where_there_is_nothing_else_are_no_fault_but_are_said(tmp_path: Path, line: str) -> None:
    text = "\n".join(f"node-{rank // 2}:{1000 + rank}:{1000 + rank} [0] NCCL INFO {line}" for rank in range(4))
    found = look_at(tmp_path, text + "\n" + job_log([2, 2], network="NET/Socket/0"))
    assert found.verdicts == []
    (said,) = [one for one in found.unjudged if "sockets" in one.what]
    assert "slowest hop" in said.why
    assert said.side  # nobody's health depends on it


def test_versions_that_differ_between_ranks(tmp_path: Path) -> None:
    found = look_at(tmp_path, job_log([2, 2], lambda rank: {"version": "2.18.3+cuda12.1"} if rank == 3 else {}))
    assert kinds(found) == [("mismatch", [3])]
    assert "2.18.3" in found.verdicts[0].cause


def test_a_version_mismatch_in_words_of_nccl(tmp_path: Path) -> None:
    warning = (
        "node-0:1000:1500 [0] init.cc:700 NCCL WARN Mismatched NCCL version detected : rank 0 version 22105 rank 3 "
        "version 21803"
    )
    assert ("mismatch", [0, 3]) in kinds(look_at(tmp_path, job_log([2, 2]) + warning))


def test_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    warning = "node-0:1:1 [0] init.cc:900 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
    assert kinds(look_at(tmp_path, warning)) == [("mismatch", [0, 1])]


def test_environments_that_differ_between_ranks(tmp_path: Path) -> None:
    text = job_log([2, 2], lambda rank: {"environment": {"NCCL_ALGO": "Tree" if rank == 1 else "Ring"}})
    found = look_at(tmp_path, text)
    assert kinds(found) == [("mismatch", [1])]
    assert "Tree on 1" in found.verdicts[0].cause


def test_a_variable_that_one_rank_lacks(tmp_path: Path) -> None:
    text = job_log([2, 2], lambda rank: {} if rank == 2 else {"environment": {"NCCL_IB_HCA": "mlx5_0"}})
    found = look_at(tmp_path, text)
    assert kinds(found) == [("mismatch", [2])]
    assert "not set on 2" in found.verdicts[0].cause


def test_a_rank_that_never_finished_initialising(tmp_path: Path) -> None:
    found = look_at(tmp_path, job_log([2, 2], lambda rank: {"complete": False} if rank == 2 else {}))
    assert kinds(found) == [("hang", [2])]


def test_a_peer_that_stopped_answering_is_named_with_its_host(tmp_path: Path) -> None:
    warning = (
        "node-0:1001:1600 [1] transport/net_ib.cc:100 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<5000> with "
        "status=12 opcode=0 len=0 vendor err 129 (Recv)"
    )
    (verdict,) = look_at(tmp_path, job_log([2, 2]) + warning).verdicts
    assert (verdict.kind, verdict.ranks, verdict.evidence["peer"]) == ("hang", [2], "node-1")
    assert verdict.evidence["victims"] == "1"


@pytest.mark.parametrize(
    ("complaints", "peer", "ranks"),
    [
        ([(1, 1), (4, 1)], "node-1", [2, 3]),  # two hosts lost a third one
        ([(1, 1), (2, 2)], "node-2", [4, 5]),  # node-0 lost node-1, which lost node-2: that one went first
        ([(1, 1), (0, 1), (2, 2)], "node-2", [5]),  # however often node-1 is named; rank 5 has rank 0 as neighbour
    ],
)
def test_a_host_that_lost_a_peer_itself_is_not_the_one_that_went_first(
    tmp_path: Path, complaints: list[tuple[int, int]], peer: str, ranks: list[int]
) -> None:
    """Each complaint is (rank, number of the host that it lost); hosts have two ranks."""
    text = job_log([2, 2, 2]) + "".join(
        f"node-{rank // 2}:{1000 + rank}:1600 [{rank % 2}] socket.cc:50 NCCL WARN socketProgress: Connection closed by "
        f"remote peer node-{host}<5000>\n"
        for rank, host in complaints
    )
    (verdict,) = look_at(tmp_path, text).verdicts
    assert (verdict.kind, verdict.evidence["peer"], verdict.ranks) == ("dead_rank", peer, ranks)


def test_of_hosts_that_lost_each_other_the_one_that_most_ranks_lost_is_looked_at(tmp_path: Path) -> None:
    text = job_log([2, 2]) + "".join(
        f"node-{rank // 2}:{1000 + rank}:1600 [0] socket.cc:50 NCCL WARN socketProgress: Connection closed by remote "
        f"peer node-{host}<5000>\n"
        for rank, host in [(2, 0), (0, 1), (1, 1)]
    )
    (verdict,) = look_at(tmp_path, text).verdicts
    assert verdict.evidence["peer"] == "node-1"


def test_a_failure_of_its_own_comes_before_the_loss_of_a_peer(tmp_path: Path) -> None:
    text = job_log([2, 2]) + (
        "node-0:1001:1600 [1] socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer node-1<5000>\n"
        "node-1:1003:1503 [1] enqueue.cc:100 NCCL WARN Cuda failure 'an illegal memory access was encountered'\n"
        "node-0:1001:1600 [1] NCCL INFO comm 0x55d0000100 rank 1 nranks 4 cudaDev 1 busId 2000 - Abort COMPLETE\n"
    )
    (verdict,) = look_at(tmp_path, text).verdicts
    assert (verdict.kind, verdict.ranks) == ("dead_rank", [3])
    assert (verdict.evidence["host"], verdict.evidence["victims"]) == ("node-1", "1")


def test_an_abort_without_a_reason_is_said(tmp_path: Path) -> None:
    text = job_log([2, 2]) + (
        "node-0:1001:1600 [1] NCCL INFO comm 0x55d0000100 rank 1 nranks 4 cudaDev 1 busId 2000 - Abort COMPLETE\n"
    )
    (verdict,) = look_at(tmp_path, text).verdicts
    assert (verdict.kind, verdict.ranks, verdict.evidence["hosts"]) == ("hang", [1], "node-0")


def aborts(ranks: Sequence[int]) -> str:
    """What so many ranks of a job of two hosts with two GPUs write when they abort their communicator."""
    return "".join(
        f"node-{rank // 2}:{1000 + rank}:1600 [{rank % 2}] NCCL INFO comm 0x55d0{rank:04x}00 rank {rank} nranks 4 "
        f"cudaDev {rank % 2} busId 2000 - Abort COMPLETE\n"
        for rank in ranks
    )


@pytest.mark.parametrize(("ranks", "named"), [([], []), ([3], [3]), ([0, 3], []), ([0, 1, 3], []), ([0, 1, 2, 3], [])])
def test_aborts_accuse_only_ranks_that_are_fewer_than_half(tmp_path: Path, ranks: list[int], named: list[int]) -> None:
    """All ranks abort at the end of many a good run: PyTorch's destroy_process_group leaves that in the log."""
    found = look_at(tmp_path, job_log([2, 2]) + aborts(ranks))
    assert kinds(found) == ([("hang", named)] if named else [])


def test_what_all_communicators_share_is_said_once(tmp_path: Path) -> None:
    text = "".join(
        job_log([2, 2], network="NET/Socket/0", comm_id=f"0x{number}f", environment={"NCCL_IB_DISABLE": "1"})
        for number in range(5)
    )
    (verdict,) = look_at(tmp_path, text).verdicts
    assert verdict.evidence["communicators"] == 5


def test_old_logs_that_mix_ring_and_tree_hops_are_not_called_broken(tmp_path: Path) -> None:
    """2.5 prints `Ring 00` before hops of trees as well."""
    tree = "a:2:12 [1] NCCL INFO Ring 00 : 1[a000] -> 2[b000] via P2P/IPC\n"
    text = BUS_IDS_2_10.replace("Channel 00/02 :    0   1\n", "Threads per block : 512/640/256\n").replace(
        "nranks 2", "nranks 3"
    )
    found = look_at(tmp_path, text + tree)
    assert [verdict.kind for verdict in found.verdicts] == []


def test_one_rank_of_eight_is_said_to_be_one_of_eight(tmp_path: Path) -> None:
    found = look_at(tmp_path, "\n".join(log_of_rank(0, hosts_of([4, 4]))))
    assert found.verdicts == []
    assert "1 rank of 8" in found.unjudged[0].why


def test_a_hop_belongs_to_the_communicator_that_it_names_not_to_the_newest(tmp_path: Path) -> None:
    """A thread that makes two communicators may connect the first after it began the second."""
    first = job_log([4], comm_id="0xa").replace("0x55d0", "0xaaaa").splitlines()
    second = job_log([4], comm_id="0xb", order=[0, 2, 1, 3]).replace("0x55d0", "0xbbbb")
    hops = [f"{line} comm 0xaaaa{int(line.split(':')[1]) - 1000:04x}00 nRanks 04" for line in first if " via " in line]
    found = look_at(tmp_path, "\n".join([*(line for line in first if " via " not in line), second, *hops]))
    assert found.verdicts == []
    for drawing, ring in zip(found.rings, ([1, 2, 3, 0], [2, 1, 3, 0]), strict=True):
        assert [(hop.dst, hop.via) for hop in drawing.rings[0]] == [(rank, "P2P") for rank in ring]


@pytest.mark.parametrize(("text", "order"), [(OLD_2_4, [0, 1]), (BUS_IDS_2_10, [0, 1])])
def test_older_forms_of_the_lines(tmp_path: Path, text: str, order: list[int]) -> None:
    found = look_at(tmp_path, text)
    assert found.verdicts == []
    comms = Communicators()
    for number, line in enumerate(text.splitlines()):
        for message in nccl_lines(line, number, set()):
            comms.add(message)
    (comm,) = comms.finish()
    assert ring_order(comm, 0) == order
    assert set(comm.members) == {0, 1}
    assert {(link.src, link.dst) for link in comm.links.values()} >= {(0, 1), (1, 0)}


# ------------------------------------------------------------------------------------------------ parts of it


def read(text: str) -> list[NcclCommunicator]:
    comms = Communicators()
    for number, line in enumerate(text.splitlines()):
        for message in nccl_lines(line, number, set()):
            comms.add(message)
    return comms.finish()


def init(rank: int, nranks: int, *, pid: int = 1, tid: int = 10, pointer: str = "0xa", ends: str = "") -> str:
    return f"a:{pid}:{tid} [0] NCCL INFO comm {pointer} rank {rank} nranks {nranks} cudaDev 0 busId 1{ends}\n"


def test_ranks_that_cannot_be_are_damage() -> None:
    most = 1 << 17
    assert [comm.nranks for comm in read(init(2, 3) + init(3, 3) + init(0, most) + init(0, most + 1))] == [most, 3]


def test_a_pointer_that_is_used_again_is_another_communicator() -> None:
    start, done = " commId 0x{} - Init START", " commId 0x{} - Init COMPLETE"
    text = "".join(
        init(0, 2, ends=(start + "|" + done).split("|")[way].format(name)) for name in "bc" for way in (0, 1)
    )
    comms = read(text)
    assert [(comm.name, comm.members[0].state) for comm in comms] == [
        ("0xb", "Init COMPLETE"), ("0xc", "Init COMPLETE"),
    ]  # fmt: skip
    # Versions that print no id: a process's communicators of one size are counted, whatever its pointers are.
    text = "".join(
        init(rank, 2, pid=pid, pointer=p, ends=" - Init COMPLETE")
        for rank, pid in ((0, 1), (1, 2))
        for p in ("0xa", "0xb")
    )
    assert [(comm.name, sorted(comm.members)) for comm in read(text)] == [
        ("2 ranks, number 1", [0, 1]), ("2 ranks, number 2", [0, 1]),
    ]  # fmt: skip
    assert [comm.name for comm in read(init(0, 2) + init(0, 2) + init(1, 2) + init(0, 4))] == [
        "4 ranks, number 1", "2 ranks, number 1", "2 ranks, number 2",
    ]  # fmt: skip


def test_lines_of_a_thread_that_never_names_its_communicator_count_to_the_newest_of_its_process() -> None:
    hop = "a:1:{} [0] NCCL INFO Channel 00/0 : {} via P2P/IPC\n"
    (comm,) = read(hop.format(77, "0[0] -> 1[1]") + init(0, 2) + hop.format(78, "1[1] -> 0[0]"))
    assert set(comm.links) == {(0, 0, 1), (0, 1, 0)}
    assert read(hop.format(77, "0[0] -> 1[1]")) == []
    (comm,) = read(hop.format(10, "0[0] -> 1[1]") + init(0, 2))  # of the thread that names it at the end
    assert set(comm.links) == {(0, 0, 1)}


def test_hops_after_the_rings_are_those_of_trees_and_second_connections_are_none() -> None:
    lines = [
        "Channel 00/0 : 0[0] -> 1[1] via P2P/IPC", "Channel 00/1 : 0[0] -> 3[3] via P2P/IPC",
        "Channel 00/0 : 1[1] -> 2[2] via P2P/IPC", "Connected all rings", "Channel 00/0 : 0[0] -> 2[2] via P2P/IPC",
        "Channel 00/0 : 1[1] -> 2[2] via P2P/IPC",
    ]  # fmt: skip
    (comm,) = read(init(0, 4, ends=" - Init START") + "".join(f"a:1:10 [0] NCCL INFO {line}\n" for line in lines))
    assert {key[1:]: link.ring for key, link in comm.links.items()} == {(0, 1): True, (1, 2): True, (0, 2): False}
    assert ring_order(comm, 0) == [0, 1, 2]
    assert ring_order(comm, 1) == []


def test_a_ring_that_ends_is_broken_only_where_all_logs_are_here(tmp_path: Path) -> None:
    def told(members: int, *, skip: str) -> list[tuple[str, list[int]]]:
        hops = "".join(
            f"a:{rank}:{rank} [0] NCCL INFO Channel 00/0 : {rank}[0] -> {(rank + 1) % 4}[0] via P2P/IPC\n"
            for rank in range(4)
            if str(rank) not in skip
        )
        names = "".join(init(rank, 4, pid=rank, tid=rank, pointer=f"0x{rank}") for rank in range(members))
        return kinds(look_at(tmp_path, names + hops))

    assert told(4, skip="") == []
    assert told(4, skip="2") == [("broken_ring", [2])]
    assert told(3, skip="2") == []
    assert told(4, skip="012") == [("broken_ring", [0])]


def test_a_ring_of_which_little_is_known_is_damage_and_one_with_a_rank_twice_names_it(tmp_path: Path) -> None:
    text = job_log([6])
    for order, ranks, why in (
        ("0  1", [], "only 2 ranks of 6 are in it"),
        ("0  1  2", [3, 4, 5], "without ranks 3-5"),
        ("0  1  2  3  4  5  1", [1], "rank 1 is in it twice"),
        ("0  0  2  1  1  3  4  5", [0, 1], "ranks 0 and 1 are in it twice"),
        ("0  1  2  3  4  4", [5], "without rank 5 and rank 4 is in it twice"),
    ):
        found = look_at(tmp_path, text.replace("00/02 :  0  1  2  3  4  5", f"00/02 :  {order}"))
        assert [(one.ranks, one.cause) for one in found.verdicts] == [
            (ranks, f"the ring of channel 0 is broken: {why}")
        ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("NCCL_IB_DISABLE set by environment to 0.", ""),
        ("NCCL_IB_DISABLE set by environment to 1.", "NCCL_IB_DISABLE=1 is set"),
        ("NCCL_NET set by environment to IB.", "NCCL_NET=IB asks for something else"),
        ("NCCL_NET set by environment to Socket.", ""),
        ("NCCL_IB_HCA set by environment to none.", ""),
        ("NET/Plugin: Failed to load plugin", ""),
        ("NET/OFI : Failed to initialize", "a network could not be initialised (NET/OFI : Failed to initialize)"),
        ("Failed to initialize NET/OFI", ""),
        ("ncclNet init failed", "a network could not be initialised (ncclNet init failed)"),
        ("Using network IBext_v8", "a has a better network (Using network IBext_v8)"),
        ("Using network Socket", ""),
        ("GPU Direct RDMA Enabled for HCA 0", "a has a better network (GPU Direct RDMA Enabled for HCA 0)"),
        ("Failed to open libibverbs.so", "libibverbs could not be loaded"),
    ],
)
def test_what_shows_that_sockets_are_a_fallback(text: str, reason: str) -> None:
    network = NcclNetwork()
    network.add(Line("a", 1, 1, 0, "INFO", text, 1))
    assert (network.fallback, network.tried) == (reason, bool(reason))
    assert network.reason == (reason or "the log gives no reason")
    network.add(Line("b", 1, 1, 0, "INFO", "NCCL_IB_DISABLE set by environment to 1.", 1))
    assert network.fallback == (reason or "NCCL_IB_DISABLE=1 is set")  # the first that shows


def test_hosts_without_a_device_are_named_four_at_most() -> None:
    network = NcclNetwork()
    for host in "edcba":
        network.add(Line(host, 1, 1, 0, "INFO", "NET/IB : No device found.", 1))
    assert (network.tried, network.fallback) == (True, "")
    assert network.reason == "NCCL looked for InfiniBand or RoCE and found no device (a, b, c, d)"


def test_nvlink_wins_over_whatever_else_joins_gpus() -> None:
    settings = NcclSettings()
    told = []
    for text in ("nothing", "Pattern 4, type PHB/PIX", "Pattern 4, type NVL/PIX", "Pattern 4, type SYS/PIX"):
        settings.add(Line("a", 1, 1, 0, "INFO", text, 1))
        told.append(settings.nvlink)
    assert told == [None, False, True, True]


@pytest.mark.parametrize(
    ("values", "ranks", "cause"),
    [
        (["a", "a", "a"], None, ""),
        (["a", "b", "a"], [1], "NCCL_X differs between ranks: a on 0, 2; b on 1"),
        (["a", "b"], [0, 1], "NCCL_X differs between ranks: a on 0; b on 1"),
        (
            ["", "b", "b", "c", "d", "e"], [0, 3, 4, 5],
            "NCCL_X differs between ranks: b on 1, 2; not set on 0; c on 3; d on 4",
        ),
    ],
)  # fmt: skip
def test_who_differs_from_most_is_named_and_a_tie_decides_nothing(
    values: list[str], ranks: list[int] | None, cause: str
) -> None:
    settings = NcclSettings()
    for rank, value in enumerate(values):
        shown = {"NCCL_X": value, "NCCL_DEBUG": str(rank)} if value else {"NCCL_DEBUG": "x"}
        settings.environment["a", rank] = shown
        settings.versions["a", rank] = "2.21"
    settings.environment["b", 0] = {"NCCL_X": "of a process that is no rank"}
    verdicts = judge_settings(settings, {("a", rank): rank for rank in range(len(values))})
    assert [(one.ranks, one.cause) for one in verdicts] == ([(ranks, cause)] if ranks else [])
    assert all(one.advice.startswith("Set NCCL_X alike on every rank") for one in verdicts)
