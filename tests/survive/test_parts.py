"""The parts of a worker, one by one, without other processes."""

import contextlib
import itertools
import os
import signal
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as replace_in

import numpy as np
import pytest
from msgspec.structs import replace
from tests.support.thread_transport import Switchboard, Threads

from ringside.commands import run
from ringside.commands.demo_kill import MARK, KillStory
from ringside.engine.dtypes import dtype_code
from ringside.engine.transports.base import LinkError, LinkFailure
from ringside.errors import MismatchError, RingsideError, StoreGoneError, UsageError
from ringside.launch.torchrun import parse_command_line
from ringside.processes import start_time
from ringside.survive.all_reduce.between_hosts import cut_off, way_around
from ringside.survive.audit import SampleDigests, committed
from ringside.survive.cluster.failpoints import PHASES, Failpoint, Failpoints
from ringside.survive.cluster.known_workers import KnownWorkers
from ringside.survive.cluster.links import PairwiseTransport, Reachability, knock_name
from ringside.survive.cluster.peers import BEATS_S, PeerPlace, PeerWait, Superseded, own_place
from ringside.survive.cluster.registers import MemoryRegisters
from ringside.survive.cluster.rendezvous import (
    EVERY_S,
    MOST_S,
    Joining,
    Knock,
    Rendezvous,
    WorkerListener,
)
from ringside.survive.cluster.store_host import is_needed
from ringside.survive.data.rebalance import WINDOW, Stragglers
from ringside.survive.protocol.decision import Abort, Commit, Decisions, MemberId, Tag, encode
from ringside.survive.protocol.events import Acknowledgement, DrainWanted, QuotasWanted
from ringside.survive.protocol.generation import Generation, MembershipChange, generation_key
from ringside.survive.protocol.settings import ProtocolSettings
from ringside.survive.state.transfer import choose_giver
from ringside.survive.supervisor import REFUSED, Supervisor, main
from verification.survive.audit import audit

A, B = MemberId(0, 1), MemberId(1, 1)


# ------------------------------------------------------------------------------------------------ meeting


def test_a_rank_that_comes_again_gets_another_seat_and_its_own_mail():
    rendezvous = Rendezvous(MemoryRegisters(), 2)
    place = PeerPlace("here", 7, 8, 0)
    first, second = (rendezvous.claim(1, 1, PeerPlace("here", 7, 8, life)) for life in (1, 2))
    assert (first, second) == (MemberId(1, 1), MemberId(1, 2))
    rendezvous.send(1, second, Joining(A))
    rendezvous.send(1, second, Knock(A, 1))
    assert rendezvous.receive(1, first) == []
    assert [type(message) for message in rendezvous.receive(1, second)] == [Joining, Knock]
    assert rendezvous.receive(1, second) == []
    assert rendezvous.place(1, first) == PeerPlace("here", 7, 8, 1) != place


def test_two_senders_and_a_message_that_nobody_understands():
    registers = MemoryRegisters()
    one, other = Rendezvous(registers, 2), Rendezvous(registers, 2)
    one.send(1, B, Joining(A))
    registers.create("1/mail/1/1/1", b"\xff")
    other.send(1, B, Joining(MemberId(2, 1)))
    assert one.receive(1, B) == [Joining(A), Joining(MemberId(2, 1))]


def test_founders_are_the_living_ones_and_the_first_list_stands():
    registers = MemoryRegisters()
    rendezvous = Rendezvous(registers, 2)
    for rank, life in ((0, 1), (1, 1), (1, 2)):
        rendezvous.claim(1, rank, PeerPlace("here", rank, 0, life))
    assert rendezvous.founders(1, 5.0, lambda seat: True) == (MemberId(0, 1), MemberId(1, 2))
    assert rendezvous.founders(1, 5.0, lambda seat: False) == (MemberId(0, 1), MemberId(1, 2))
    late = Rendezvous(MemoryRegisters(), 2)
    late.claim(1, 0, PeerPlace("here", 0, 0, 1))
    assert late.founders(1, 0.0, lambda seat: True) == (MemberId(0, 1),)


def test_incarnations_only_go_up_and_what_one_process_says_is_replaced():
    rendezvous = Rendezvous(MemoryRegisters(), 2)
    assert (rendezvous.incarnation(), rendezvous.open(2), rendezvous.open(2), rendezvous.open(1)) == (1, 2, 2, 2)
    for number in (1, 2):
        rendezvous.beat(1, A, number)
        assert rendezvous.beat_of(1, A) == number
    again = Rendezvous(rendezvous.registers, 2)
    again.beat(1, A, 5)
    assert rendezvous.beat_of(1, A) == 5


# ------------------------------------------------------------------------------------------------ waiting


class Stub:
    """A peer as a test wants it."""

    def __init__(self, ended=False, stopped=False):
        self._ended, self._stopped = ended, stopped

    def ended(self):
        return self._ended

    def stopped(self):
        return self._stopped


@pytest.mark.parametrize(
    ("peer", "silent_s"),
    [(Stub(ended=True), 60.0), (Stub(stopped=True), 1e9), (Stub(), 2.0)],
    ids=["dead", "stopped", "silent"],
)
def test_whoever_is_dead_stopped_or_silent_is_told_while_waiting(peer, silent_s):
    clock = itertools.count(step=0.01).__next__
    told = []

    def attend(suspects):
        told.extend(suspects)
        if suspects:
            raise Superseded

    with pytest.raises(Superseded):
        PeerWait({B: peer}, attend, silent_s, clock, pause=float).wait(lambda: [B])
    assert told == [B]
    PeerWait({B: peer}, attend, silent_s, clock, pause=float).wait(list)


def test_who_is_slow_is_awaited_for_its_time_and_one_that_goes_on_is_not_dead():
    """A look at the clock takes 1/64 s; it is looked after members whenever more than 2 ms have passed."""
    ticks = itertools.count()
    told = []
    late = iter([[B]] * 40 + [[]])
    peers = {B: Stub()}
    waits = PeerWait(peers, told.append, 1.0, lambda: next(ticks) / 256, pause=float)
    waits.wait(lambda: next(late))
    assert len(told) == 40
    assert [] in told
    now, peers = [0.0], {B: Stub(stopped=True)}
    waits = PeerWait(peers, told.append, 1.0, lambda: now[0], pause=float)
    for at, dead in ((0.0, []), (1.0, []), (1.25, [B]), (1.2505, [B])):
        now[0] = at
        assert waits.dead() == dead
    now[0], peers[B] = 1.5, Stub()
    assert waits.dead() == []
    peers[B] = Stub(stopped=True)
    for at, dead in ((2.0, []), (3.0, []), (3.25, [B])):
        now[0] = at
        assert waits.dead() == dead


# ------------------------------------------------------------------------------------------------ stragglers


def fed(mode, seconds, steps=WINDOW, quotas=None):
    stragglers = Stragglers(mode)
    answers = [stragglers.add(1, quotas or {0: 6, 1: 6}, seconds) for _ in range(steps)]
    return stragglers, [answer for answer in answers if answer is not None]


def test_a_rank_that_takes_twice_as_long_gets_fewer_and_the_gain_is_measured():
    stragglers, (wanted,) = fed("rebalance", {0: 0.01, 1: 0.02})
    assert wanted == QuotasWanted(((0, 8), (1, 4)))
    (change, measured), *_ = stragglers.done
    assert measured is None
    assert change.predicted == pytest.approx(1 / 3)
    for _ in range(WINDOW):
        assert stragglers.add(2, {0: 8, 1: 4}, {0: 0.01, 1: 0.02}) is None
    assert stragglers.done[0][1] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("mode", "seconds", "quotas"),
    [
        ("alert", {0: 0.01, 1: 0.02}, None),
        ("rebalance", {0: 0.01, 1: 0.0104}, None),
        ("rebalance", {0: 1e-4, 1: 2e-4}, None),
        ("rebalance", {0: 0.01}, None),
        ("drain", {0: 0.01, 1: 0.02}, None),
    ],
)
def test_nothing_is_changed_that_was_not_asked_for_or_is_not_worth_it(mode, seconds, quotas):
    assert fed(mode, seconds, quotas=quotas)[1] == []


@pytest.mark.parametrize(("times", "drained"), [(2.9, []), (3.1, [DrainWanted(1)])])
def test_a_rank_is_drained_that_takes_more_than_three_times_as_long_as_the_others(times, drained):
    assert fed("drain", {0: 0.01, 1: times * 0.01, 2: 0.01}, quotas={0: 4, 1: 4, 2: 4})[1] == drained


def test_a_hopeless_rank_is_drained_and_one_stall_is_not_hopeless(caplog):
    assert fed("drain", {0: 0.01, 1: 0.05, 2: 0.01}, quotas={0: 4, 1: 4, 2: 4})[1] == [DrainWanted(1)]
    stragglers = Stragglers("drain")
    rows = [{0: 0.01, 1: 0.01}] * (WINDOW - 1) + [{0: 0.01, 1: 9.0}]
    assert [stragglers.add(1, {0: 6, 1: 6}, row) for row in rows] == [None] * WINDOW
    with pytest.raises(UsageError, match="alert, rebalance, drain"):
        Stragglers("ignore")


def test_a_window_is_of_one_generation_and_of_steps_in_which_all_could_be_timed():
    stragglers, slow = Stragglers("rebalance"), {0: 0.01, 1: 0.02}
    for _ in range(WINDOW - 1):
        assert stragglers.add(1, {0: 6, 1: 6}, slow) is None
    for seconds in ({0: 0.01}, {0: 0.01, 1: 0.0}):
        assert stragglers.add(1, {0: 6, 1: 6}, seconds) is None, "nobody was timed"
    for _ in range(WINDOW - 1):
        assert stragglers.add(2, {0: 6, 1: 6}, slow) is None, "another generation"
    assert stragglers.add(2, {0: 6, 1: 6}, slow) is not None
    for _ in range(WINDOW - 1):
        assert stragglers.add(2, {0: 6, 1: 6}, slow) is None, "a window anew, and other quotas are not measured"
    stragglers.add(2, {0: 6, 1: 6}, slow)
    assert [measured for _, measured in stragglers.done] == [None, None]


def test_what_other_quotas_would_gain_is_said_and_once_where_nothing_is_done(caplog):
    caplog.set_level("INFO", "ringside")
    stragglers, _ = fed("alert", {0: 0.01, 1: 0.025}, steps=WINDOW + 3)
    (told,) = caplog.messages
    assert told == (
        "rank 1 takes 2.5 times as long per micro-batch as the fastest: quotas (9, 3) instead of (6, 6) make computing "
        "40 % shorter (on_straggler='rebalance')"
    )
    caplog.clear()
    stragglers, _ = fed("rebalance", {0: 0.01, 1: 0.02})
    for _ in range(WINDOW):
        stragglers.add(2, {0: 8, 1: 4}, {0: 0.012, 1: 0.02})
    assert [told.partition(":")[2] for told in caplog.messages] == [
        " quotas (8, 4) instead of (6, 6) make computing 33 % shorter",
        " computing takes 20 % less, 33 % foretold",
    ]


@pytest.mark.parametrize(
    ("seconds", "quotas", "wanted"),
    [
        ({0: 0.002, 1: 0.004}, {0: 2, 1: 1}, None),  # nothing to gain
        ({0: 0.0005, 1: 0.001}, {0: 5, 1: 5}, QuotasWanted(((0, 7), (1, 3)))),  # 5 ms
        ({0: 0.00049, 1: 0.00098}, {0: 5, 1: 5}, None),  # 4.9 ms
        ({0: 0.01, 1: 1.0}, {0: 6, 1: 6}, None),  # one would have nothing to do
        ({0: 0.019, 1: 0.02}, {0: 19, 1: 20}, QuotasWanted(((0, 20), (1, 19)))),  # exactly 5 %
    ],
)
def test_other_quotas_are_wanted_for_a_twentieth_of_five_milliseconds(seconds, quotas, wanted):
    assert fed("rebalance", seconds, quotas=quotas)[1] == ([] if wanted is None else [wanted])


def test_exactly_three_times_as_long_is_not_hopeless_and_who_was_drained_is_drained_once():
    four = dict.fromkeys(range(4), 3)
    assert fed("drain", {0: 0.25, 1: 0.75, 2: 0.25, 3: 0.5}, quotas=four)[1] == []
    assert fed("drain", {0: 0.25, 1: 0.76, 2: 0.25, 3: 0.25}, steps=2 * WINDOW - 1, quotas=four)[1] == [DrainWanted(1)]
    assert fed("drain", {0: 0.5}, quotas={0: 4})[1] == [], "there are no others"


# ------------------------------------------------------------------------------------------------ who is not there


HERE = own_place()
DEAD = replace(HERE, pid=2**22 + 1, started=1)
KEPT = replace(DEAD, keeper=(os.getpid(), HERE.started))
ELSEWHERE = replace(DEAD, machine="elsewhere/1")


def known_of(rendezvous):
    return KnownWorkers(rendezvous, 1, lambda seat: 0.0)


@pytest.mark.parametrize(
    ("places", "refused", "gone"),
    [
        ([], None, False),  # nobody knows
        ([], DEAD, True),  # refused before it took part
        ([HERE], None, False),
        ([DEAD], None, True),
        ([ELSEWHERE], None, False),  # nothing is known of another host
        ([KEPT], None, False),  # it is started again
        ([replace(DEAD, keeper=(os.getpid(), 1))], None, True),  # that number is another process now
        ([HERE], HERE, True),  # it has been refused itself
        ([DEAD, HERE], DEAD, False),
        ([HERE, DEAD], HERE, True),
        ([KEPT], replace(KEPT, pid=7), True),
        ([KEPT], replace(DEAD, pid=7), False),
    ],
)  # fmt: skip
def test_a_rank_is_gone_when_its_process_is_dead_and_nobody_starts_another(places, refused, gone):
    rendezvous = Rendezvous(MemoryRegisters(), 2)
    for life, place in enumerate(places):
        rendezvous.claim(1, 1, replace(place, life=life))
    if refused is not None:
        rendezvous.refuse(1, refused)
    assert known_of(rendezvous).is_gone(1) == gone


def test_who_is_left_alone_by_refused_strangers_does_not_go_on():
    def left(members, *ranks, came=None):
        rendezvous = Rendezvous(MemoryRegisters(), 3)
        if came is not None:
            rendezvous.claim(1, 2, came)
        for rank in ranks:
            rendezvous.refuse(rank, DEAD)
        known_of(rendezvous).refuse_to_be_left_alone(Generation(1, 2, 0, 0, members, ()), 0)

    left((A, B), 1, 2)
    left((A,), 1)
    left((A,), 1, 2, came=HERE)  # it was trained with
    for came in (None, DEAD):
        with pytest.raises(MismatchError, match=r"rank 0 is the only one left.*\(ranks 1 and 2\)"):
            left((A,), 1, 2, came=came)
    known_of(Rendezvous(MemoryRegisters(), 1)).refuse_to_be_left_alone(Generation(1, 2, 0, 0, (A,), ()), 0)


def test_a_rank_is_claimed_unless_another_living_process_is_it():
    rendezvous = Rendezvous(MemoryRegisters(), 2)
    known = known_of(rendezvous)
    try:
        assert known.claim(1, DEAD) == MemberId(1, 1)
        assert known.claim(1, HERE) == MemberId(1, 2), "the one before is dead"
        assert known.claim(1, replace(HERE, life=1)) == MemberId(1, 3), "it was this process"
        parent = replace(HERE, pid=os.getppid(), started=start_time(os.getppid()))
        rendezvous.claim(1, 1, parent)
        with pytest.raises(MismatchError, match=f"rank 1 of this job runs already, as process {os.getppid()}"):
            known.claim(1, replace(HERE, life=2))
        assert known.peer(MemberId(1, 2)).is_this_process
        assert not known.peer(MemberId(1, 4)).is_this_process
        with pytest.raises(RingsideError, match=r"rank 1 \(epoch 9\) never reported where it runs"):
            known.peer(MemberId(1, 9))
        known.ensure_dead(MemberId(1, 2))  # which is this process: nothing is done to it
    finally:
        known.close()


def test_of_another_host_a_process_that_beats_is_the_rank_already(monkeypatch):
    rendezvous = Rendezvous(MemoryRegisters(), 2)
    monkeypatch.setattr("time.sleep", lambda seconds: rendezvous.beat(1, B, 2))
    known = known_of(rendezvous)
    try:
        rendezvous.claim(1, 1, ELSEWHERE)
        assert known.claim(1, HERE) == MemberId(1, 2), "it never gave a sign of life"
        rendezvous.beat(1, B, 1)
        with pytest.raises(MismatchError, match="runs already"):
            known.claim(1, replace(HERE, life=1))
    finally:
        known.close()


# ------------------------------------------------------------------------------------------------ decisions afterwards


def written(*decisions, generations=2):
    registers = MemoryRegisters()
    last = Generation(1, generations, 0, 0, (A,), (0,))
    registers.create(generation_key(1), encode(last))
    for number, step, decision in decisions:
        assert Decisions(registers).decide(Tag(1, number, step, 0), decision) == decision
    return registers


def commit(step):
    return Commit((A,), 8 * step, 8, 8, "x")


def test_the_audit_finds_steps_that_are_missing_or_committed_twice():
    good = written((1, 0, commit(0)), (1, 1, Abort(2)), (2, 1, commit(1)))
    assert audit(good, 2) == []
    assert audit(good, 3) == ["step 2 is not committed"]
    twice = written((1, 0, commit(0)), (2, 0, commit(0)))
    assert audit(twice, 1) == ["step 0 is committed twice in incarnation 1", "step 0 is committed twice"]


# ------------------------------------------------------------------------------------------------ traps, keepers, words


def test_commits_have_the_samples_and_digests_of_their_steps():
    settings = ProtocolSettings(1, lambda step: (8 * step, 8))
    registers = written((1, 0, commit(0)), (1, 1, commit(1)), (2, 2, commit(2)))
    digests = SampleDigests()
    for step in (1, 2):
        digests.add(Tag(1, 1, step, 0), f"{step:016x}")
    assert [digests.of(Tag(1, 1, step, 0)) for step in (0, 1, 2, 3)] == ["", f"{1:016x}", f"{2:016x}", ""]
    assert digests.of(Tag(1, 2, 1, 0)) == digests.of(Tag(2, 1, 1, 0)) == ""
    found = [decision for _, decision in committed(registers, 9, settings)]
    assert [(each.first, each.samples, each.divisor, each.digest) for each in found] == [
        (0, 8, 8, ""), (8, 8, 8, "x"), (16, 8, 8, "x"),
    ]  # fmt: skip
    assert [tag.step for tag, _ in committed(registers, 2, settings)] == [0, 1]
    assert {each.divisor for _, each in committed(registers, 9, replace_in(settings, mean=False))} == {1}
    with pytest.raises(MismatchError, match="had the result x, not 0000000000000001 as was applied here"):
        committed(registers, 9, settings, digests)
    later = replace_in(settings, samples=lambda step: (8 * step + 8 * (step == 0), 8))
    with pytest.raises(MismatchError, match="began at sample 0, not at 8"):
        committed(registers, 9, later)


def test_a_trap_is_of_one_incarnation_and_of_the_rank_that_it_names():
    sprung = []
    environ = {"RINGSIDE_SURVIVE_TRAP": "kill:rank=1,phase=offer,incarnation=2;;stop:rank=0,phase=offer"}
    here = Failpoints.of_environment(1, environ)
    assert here.traps == (
        Failpoint(signal.SIGKILL, 1, "offer", incarnation=2), Failpoint(signal.SIGSTOP, 0, "offer")
    )  # fmt: skip
    assert Failpoints.of_environment(1, {}).traps == ()
    here.spring = sprung.append
    here.reached("offer")
    here.incarnation = 2
    here.reached("offer")
    here.reached("offer")
    assert sprung == [signal.SIGKILL]


def test_a_trap_springs_once_where_it_was_laid():
    sprung = []
    traps = tuple(map(Failpoint.parse, ("kill:rank=1,step=3,phase=mid_chunk", "stop:rank=1,epoch=2,phase=rejoin")))
    assert traps[0] == Failpoint(signal.SIGKILL, 1, "mid_chunk", 3)
    here = Failpoints(1, traps, sprung.append)
    for step, phase in ((2, "mid_chunk"), (3, "compute"), (4, "mid_chunk"), (5, "mid_chunk"), (5, "rejoin")):
        here.step = step
        here.reached(phase)
    assert sprung == [signal.SIGKILL]
    here.epoch = 2
    here.reached("rejoin")
    assert sprung == [signal.SIGKILL, signal.SIGSTOP]


@pytest.mark.parametrize(
    "spec", ["kill", "burn:rank=1,phase=offer", "kill:rank=1,phase=lunch", "kill:rank=x,phase=offer"]
)
def test_traps_that_are_none_are_refused(spec):
    with pytest.raises(UsageError, match=PHASES[-1]):
        Failpoint.parse(spec)


STORE_GONE = StoreGoneError.exit_status


class Ends(Supervisor):
    """A keeper whose worker ends as told: with a status, or in a pair with the step that the job had come to."""

    def __init__(self, *ends):
        super().__init__(["train.py"], {"RANK": "2"})
        self.ends = list(ends)

    def _run_once(self, stop):
        status, steps = end if isinstance(end := self.ends.pop(0), tuple) else (end, 0)
        self.kept.progressed(steps)
        return status


class Stop:
    signum = 0


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ((0,), 0),
        ((-9, -9, -9, -9, 0), 0),
        ((REFUSED,), 0),
        ((1, 1, 1), 1),
        ((1, -9, 1, 1), 1),
        ((1, 1, (1, 7), 1, 1, (-9, 8), 1, 1, 0), 0),
        ((1, 1, (1, 7), (1, 7), (1, 7), (1, 7)), 1),
        ((-11, -11, -11), 139),
        ((-9,) * 10, 137),
        (((-9, 7), *(-9,) * 10), 137),
        ((76,), 76),
        ((STORE_GONE, STORE_GONE), STORE_GONE),
        ((-9, REFUSED), 0),
        ((STORE_GONE, 0), 0),
        ((STORE_GONE, REFUSED), STORE_GONE),
    ],
)
def test_a_worker_that_a_signal_ended_is_started_again_and_one_that_always_fails_is_not(ends, status, capsys):
    keeper = Ends(*ends)
    assert keeper.run(Stop()) == status
    assert keeper.ends == []
    told = capsys.readouterr().err
    again = "rank 2 was ended by SIGKILL; it is started again"
    assert (again in told) == any(end in (-9, (-9, 8), (-9, 7)) for end in ends)
    assert ("times in a row without the job having come further" in told) == (status in (1, 137, 139))
    assert ("rank 2 has lost the job's store: the others go on" in told) == (ends == (STORE_GONE, REFUSED))
    assert ((", 10 times in a row" in told), (", 3 times in a row" in told)) == (status == 137, status in (1, 139))


def test_a_keeper_wants_a_script_and_knows_whether_the_job_has_a_store():
    for words in ([], ["-m"], ["-h"], ["--help"]):
        with pytest.raises(UsageError, match="which script"):
            main(words)
    assert is_needed({"RANK": "0"})
    assert not is_needed({"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert not is_needed({"RANK": "1"})


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["--nproc-per-node", "2", "train.py", "-m"], ("ringside.survive", "train.py", "-m")),
        (["-m", "package.train", "--epochs", "3"], ("ringside.survive", "-m", "package.train", "--epochs", "3")),
    ],
)
def test_a_command_line_is_given_to_keepers(words, script, monkeypatch):
    started = []
    monkeypatch.setattr(run, "Launch", lambda command, _: started.append(command))
    monkeypatch.setattr(run, "wait_or_stop", lambda *_: 3)
    assert run.run_surviving(parse_command_line(words)) == 3
    (command,) = started
    flags, given = command[: -len(script)], command[-len(script) :]
    assert tuple(given) == script
    assert flags.count("-m") == 1
    assert flags[-1] == "-m"


def test_the_demo_tells_a_kill_the_healing_and_the_return_once():
    story = KillStory(3, victim=2)

    def step(number, at, members):
        story.add(
            f'{MARK}{{"event": "step", "rank": 0, "at": {at}, "step": {number}, "loss": 1, "members": {members}}}'
        )

    step(14, 1.0, [0, 1, 2])
    story.killed_at = 2.0
    step(15, 1.9, [0, 1, 2])
    step(16, 2.5, [0, 1])
    step(16, 2.6, [0, 1])
    step(17, 2.7, [0, 1])
    step(18, 3.5, [0, 1, 2])
    step(19, 3.6, [0, 1, 2])
    assert story.healed_s == pytest.approx(0.5)
    assert [news.partition(":")[0] for news in story.news] == [
        "step 16 is committed 500 ms after the kill",
        "rank 2 is back since step 18, with everybody's state",
    ]
    story.add("Traceback")
    assert story.tail == ["Traceback"]


# ------------------------------------------------------------------------------------------------ between hosts


def generation(ranks, broken=(), joining=()):
    seats = tuple(MemberId(rank, 1) for rank in ranks)
    return Generation(1, 4, 0, 0, seats, (ranks[0],) * 6, broken=broken, joining=joining)


@pytest.mark.parametrize(
    ("ranks", "broken", "closed"),
    [
        ((0, 2, 3, 5, 7), (), True),
        ((0, 2, 3, 5, 7), ((0, 2), (3, 5)), True),
        ((0, 2, 3), ((2, 3),), False),
        ((0, 1, 2, 3), ((0, 1), (0, 2), (0, 3)), None),
        ((0, 1), ((0, 1),), None),
        ((4,), (), True),
    ],
)
def test_sums_go_around_broken_links_as_long_as_there_is_a_way(ranks, broken, closed):
    way = way_around(generation(ranks, broken))
    used = {(ranks[a], ranks[b]) for at in range(len(ranks)) for a, b in way.links_of(at)}
    assert sorted(way.order) == list(range(len(ranks)))
    assert bool(used & set(broken)) == (closed is None)
    assert way.closed == (closed is not False)
    assert all(way.links_of(at) == sorted(way.links_of(at)) for at in range(len(ranks)))


@pytest.mark.parametrize(
    ("ranks", "broken", "gone"),
    [
        ((0, 1), (), ()),
        ((0, 2, 3), ((2, 3),), ()),
        ((0, 1), ((0, 1),), (1,)),
        ((1, 4), ((1, 4),), (4,)),
        ((0, 1, 2, 3), ((0, 2), (0, 3), (1, 2), (1, 3)), (2, 3)),  # two sides: that of the leader goes on
        ((0, 1, 2, 3), ((1, 2), (1, 3), (2, 3)), (3,)),  # the leader reaches all, and no line passes by all
        ((0, 1, 2), ((0, 1), (0, 2)), (1, 2)),
    ],
)
def test_where_no_way_is_left_those_go_whom_the_leader_cannot_reach(ranks, broken, gone):
    assert tuple(seat.rank for seat in cut_off(generation(ranks, broken))) == gone


@pytest.mark.parametrize(
    ("ranks", "broken", "joining", "gone"),
    [
        ((0, 1), ((0, 1),), (0,), (0,)),
        ((0, 1, 2), ((0, 1), (0, 2)), (0,), (0,)),
        ((0, 1, 2, 3), ((1, 2), (1, 3), (2, 3)), (0, 1, 2), (2,)),  # rank 3 alone has the state
        ((0, 1), ((0, 1),), (0, 1), (1,)),  # nobody has any
    ],
)
def test_where_no_way_is_left_whoever_brought_the_state_does_not_go(ranks, broken, joining, gone):
    assert tuple(seat.rank for seat in cut_off(generation(ranks, broken, joining))) == gone


def test_a_link_of_somebody_who_has_gone_is_no_wish_any_more():
    wishes = MembershipChange(suspects=frozenset({MemberId(1, 1)}), broken=frozenset({(0, 1)}))
    both, alone = generation((0, 1)), generation((0,))
    assert wishes.urgent(both)
    assert not wishes.left_after(alone).urgent(alone)
    assert wishes.left_after(both).broken == {(0, 1)}


def test_a_process_that_got_no_time_to_listen_takes_nobody_for_dead():
    now, rendezvous = [0.0], Rendezvous(MemoryRegisters(), 2)
    listener = WorkerListener(rendezvous, 1, A, clock=lambda: now[0])
    listener.close()  # it looks when it is told to

    def looked_after(seconds):
        now[0] += seconds
        listener.poll()
        return listener.silent_s(B)

    before = listener.silent_s(B)
    assert looked_after(100.0) - before <= MOST_S
    silent = [looked_after(EVERY_S) for _ in range(2 * round(BEATS_S / EVERY_S))]
    assert silent[0] < BEATS_S < silent[-1]
    rendezvous.beat(1, B, 1)
    assert looked_after(EVERY_S) == 0.0


class Unreached:
    """Opens connections that come about or not, as told, at once."""

    def __init__(self):
        self.names, self.carries = [], False

    def __call__(self, name, number, wanted):
        self.names.append((name, number))
        if not self.carries:
            raise RuntimeError("timed out")
        return Threads(Switchboard(2), number)


def asked_until(knocker, outcome, *members):
    """Ask until the knocks that are under way have come to their end; return what is said then."""
    for _ in range(2 * len(members)):
        knocker.may_ask(members)
        knocker.close()  # waits for it
    assert knocker.may_ask(members) == outcome
    return outcome


def test_whoever_gets_no_connection_knocks_less_and_less_often_and_says_so(caplog):
    now, carry, registers = [0.0], Unreached(), MemoryRegisters()
    knocker = Reachability(B, 1, Rendezvous(registers, 2), carry, clock=lambda: now[0])
    for pause in (5, 10, 20):
        asked_until(knocker, False, A)
        assert caplog.messages[-1] == f"rank 1 gets no connection to rank 0: it asks to join again in {pause} s"
        knocks = len(carry.names)
        now[0] += pause - 0.1
        asked_until(knocker, False, A)
        assert len(carry.names) == knocks
        now[0] += 0.2
    carry.carries = True
    assert asked_until(knocker, True, A)
    letters = Rendezvous(registers, 2).receive(1, A)
    assert letters == [Knock(B, number) for number in (1, 2, 3, 4)]
    assert carry.names == [(knock_name(1, letter, A), 1) for letter in letters]
    door = Reachability(A, 1, Rendezvous(registers, 2), carry)
    door.answer(letters[-1])
    door.close()
    assert carry.names[-1] == (knock_name(1, letters[-1], A), 0)
    carry.carries = False
    asked_until(knocker, False, A, MemberId(2, 1))  # others are there now: nothing is known of the way to them
    assert caplog.messages[-1] == "rank 1 gets no connection to ranks 0 and 2: it asks to join again in 5 s"
    assert knocker.unreached == {A, MemberId(2, 1)}


@pytest.mark.parametrize(
    ("joining", "unreached", "giver"),
    [((2,), (), 0), ((2,), (0,), 1), ((1, 2), (0,), 1), ((0, 2), (), 1), ((0, 2), (1,), 0), ((2,), (0, 1), 0)],
)
def test_who_joins_is_given_the_state_by_the_first_it_reaches(joining, unreached, giver):
    seats = tuple(MemberId(rank, 1) for rank in range(3))
    record = Generation(1, 4, 0, 0, seats, (0,) * 6, joining=joining)
    assert choose_giver(seats[2], record, [seats[rank] for rank in unreached]) == seats[giver]


class Faulty(MemoryRegisters):
    """Registers whose calls are carried out twice, or fail before or after they had their effect, as told.

    After every call all earlier ones come once more, as what was sent again may.
    """

    def __init__(self, faults=()):
        super().__init__()
        self.faults, self.calls = list(faults), []

    def create(self, key, value):
        return self._asked(super().create, key, value)

    def swap(self, key, expected, new):
        return self._asked(super().swap, key, expected, new)

    def _asked(self, call, *words):
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "lost":
            raise StoreGoneError("the request was lost")
        answer = call(*words)
        self.calls.append((call, words))
        for again, known in self.calls:
            again(*known)
        if fault == "unanswered":
            raise StoreGoneError("the answer was lost")
        return call(*words) if fault == "twice" else answer


class Exchangeable:
    """A meeting in whose place another one can be put."""

    def __init__(self, rendezvous):
        self.rendezvous = rendezvous

    def __getattr__(self, name):
        return getattr(self.rendezvous, name)


def test_the_latest_acknowledgement_stands_however_often_a_store_is_asked():
    pytest.importorskip("torch")
    from ringside.survive.all_reduce.between_hosts import NetExchange
    from ringside.survive.all_reduce.one_host import HostLayout

    record = generation((0, 1))
    layout = HostLayout(0, [], {0: (), 1: ()})

    def end_of(seat, rendezvous):
        others = {other: Stub() for other in record.members if other != seat}
        failpoints, peer_wait = Failpoints(seat.rank), PeerWait(others, list)
        return NetExchange(seat, record, layout, rendezvous, peer_wait, failpoints, Unreached())

    asked = {seat: Exchangeable(Rendezvous(Faulty(), 2)) for seat in record.members}
    ends = {seat: end_of(seat, asked[seat]) for seat in record.members}
    leader, other = ends[record.leader], ends[record.members[1]]
    for faults in itertools.product(("", "twice", "lost", "unanswered"), repeat=4):
        registers = Faulty(faults)
        for one in asked.values():
            one.rendezvous = Rendezvous(registers, 2)
        for step in range(6):
            ack = Acknowledgement(record.tag(step), other.seat, f"{step:016x}")
            if not acknowledged(other, ack, tries=1 + step % 2):
                continue  # the next one follows on what nobody knows to stand
            assert leader.acknowledgements(record.tag(step), checked=False) == [ack], faults
            assert leader.acknowledgements(record.tag(step + 1), checked=False) == [], faults
    for end in ends.values():
        end.close()


def acknowledged(exchange, ack, tries):
    """Acknowledge, again if the store fails; tell whether it did not in the end."""
    for _ in range(tries):
        with contextlib.suppress(StoreGoneError):
            exchange.acknowledge(ack)
            return True
    return False


@pytest.mark.parametrize("per_micro_batch", [True, False])
@pytest.mark.parametrize("broken", [(), ((0, 1),)], ids=["ring", "line"])
def test_members_on_several_hosts_get_the_same_sum_with_or_without_a_ring(per_micro_batch, broken):
    pytest.importorskip("torch")
    from ringside.survive.all_reduce.between_hosts import NetExchange
    from ringside.survive.all_reduce.gradients import AttemptRun
    from ringside.survive.all_reduce.one_host import HostLayout

    record, boards = generation((0, 1, 2), broken), defaultdict(lambda: Switchboard(2))
    slots = {0: (0, 2), 1: (1,), 2: ()} if per_micro_batch else {0: (0,), 1: (1,), 2: (2,)}
    layout = HostLayout(40, [AttemptRun(dtype_code("float64"), 8, 0, 5)], slots)
    guard, opened, all_have_it = threading.Lock(), [], threading.Barrier(3)

    def pair(name, number, wanted):
        with guard:
            opened.append(name)
            return Threads(boards[name], number)

    def summed(seat):
        others = {other: Stub() for other in record.members if other != seat}
        rendezvous = Rendezvous(MemoryRegisters(), 3)
        exchange = NetExchange(seat, record, layout, rendezvous, PeerWait(others, list), Failpoints(seat.rank), pair)
        for of, slot in zip(slots[seat.rank], exchange.slots, strict=True):
            slot.view(np.float64)[:] = np.arange(5) + 10.0**of
        total = np.zeros(40, dtype=np.uint8)
        for step in range(2):
            exchange.run(step, total)
        all_have_it.wait(20)
        exchange.close()
        return total.view(np.float64).tolist()

    with ThreadPoolExecutor(3) as pool:
        totals = list(pool.map(summed, record.members))
    assert totals == [[3.0 * at + 111 for at in range(5)]] * 3
    assert any(name.endswith("0-1") for name in opened) == (not broken)


class Pair:
    """A group of two whose peer is lost, or that cannot be made."""

    def __init__(self, name, number):
        if name.endswith("0-1"):
            raise RuntimeError("timed out")
        self.name, self.number, self.failed = name, number, []

    def send(self, peer, data):
        raise LinkError(LinkFailure("lost", peer))

    def fail(self, cause):
        self.failed.append(cause)

    def close(self, *, patience_s):
        self.failed.append("closed")


def test_neighbours_name_who_is_at_the_end_of_a_link_that_failed():
    opened = []

    def pair(name, number, wanted):
        opened.append(Pair(name, number))
        return opened[-1]

    ring = PairwiseTransport(pair, "1/group/4", 3, 4, [(1, 3), (2, 3)], bool)
    assert [(one.name, one.number) for one in opened] == [("1/group/4/1-3", 1), ("1/group/4/2-3", 1)]
    with pytest.raises(LinkError) as caught:
        ring.send(2, b"")
    assert caught.value.cause == LinkFailure("lost", 2)
    ring.fail(LinkFailure("left", 3))
    assert [one.failed for one in opened] == [[LinkFailure("left", 1), "closed"]] * 2
    with pytest.raises(LinkError) as caught:
        PairwiseTransport(pair, "g", 1, 3, [(0, 1), (1, 2)], bool)
    assert caught.value.cause == LinkFailure("lost", 0)
