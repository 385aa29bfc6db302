"""A part of `make prove`: the kill matrix, each rule broken, every state of small jobs; and the proof itself."""

import json
import random

import numpy as np
import pytest

from ringside.schedule import by_name, run
from ringside.survive.protocol import Member
from ringside.survive.protocol.decision import Abort, Commit, MemberId, Tag
from ringside.survive.protocol.generation import Generation
from verification.survive import simulated_process
from verification.survive.__main__ import main
from verification.survive.broken_rules import Rules
from verification.survive.faults import Fault, Kind, Phase, Point
from verification.survive.invariants import DECISIONS, LAST
from verification.survive.kill_matrix import ALGORITHMS, make_world, matrix_cases, run_case, strike
from verification.survive.model_checker import Bounds, explore
from verification.survive.mutants import break_rule, rule_names
from verification.survive.sample_counting import Counting
from verification.survive.simulated_exchange import Exchange, ring_order
from verification.survive.simulated_process import Process
from verification.survive.simulated_world import Case


def test_a_part_of_the_kill_matrix():
    seen = [run_case(case) for case in matrix_cases(seed=1, count=130)]
    assert [(result.case, result.broken) for result in seen if result.broken] == []
    assert {fault.kind for result in seen for fault in result.case.faults} == set(Kind)
    assert sum(result.struck for result in seen) > 100
    assert all(result.commits >= Counting().steps for result in seen)


@pytest.mark.core
@pytest.mark.parametrize("rule", rule_names())
def test_a_broken_rule_is_noticed(rule):
    mutant = break_rule(rule, enough=1)
    assert mutant.ok, f"{mutant.tried} cases, and nothing was noticed"


def test_without_faults_everything_is_done_once():
    result = run_case(Case(7, ()))
    assert not result.broken
    assert result.commits == Counting().steps
    assert run_case(Case(7, ())) == result


def test_who_is_started_again_before_there_was_a_generation_founds_one():
    world = make_world(Case(5, ()))
    world.after(0.01, lambda: strike(Kind.ALL_GONE, world, world.processes[MemberId(0, 1)]))
    invariants = world.run()
    assert (invariants.broken, invariants.commits, world.incarnation) == ({}, Counting().steps, 1)
    assert all(seat.epoch == 2 for seat, process in world.processes.items() if process.finished)


def test_an_answer_that_comes_after_the_incarnation_it_is_of_is_not_told():
    world = make_world(Case(5, ()))
    here = Process(world, MemberId(0, 1))
    here.member = Member(here.seat, 2, world.settings)
    here.generation_stands(Generation(1, 3, 0))
    assert here.member.newest is None
    here.generation_stands(Generation(2, 1, 0))
    assert here.member.newest == Generation(2, 1, 0)


def test_a_commit_in_a_generation_that_was_ended_breaks_an_invariant():
    world = make_world(Case(5, ()))
    commit = Commit((MemberId(0, 1),), 0, 1, 1, "x")
    world.end_generation(1, 2, Abort(3))
    world.invariants.decided(Tag(1, 1, 0, 0), commit)
    assert DECISIONS not in world.invariants.broken
    world.invariants.decided(Tag(1, 2, 1, 0), commit)
    assert "a COMMIT after the generation was ended" in world.invariants.broken[DECISIONS]


def test_the_matrix_has_every_place_once():
    every = list(matrix_cases())
    assert len({case.faults[-1] for case in every}) == len(every) == len(Kind) * (4 * 6 * 2 + 4 + 3 + 3 + 4) * 4


@pytest.mark.parametrize("phase", Phase)
def test_every_place_of_the_matrix_is_come_to(phase):
    cases = [case for case in matrix_cases() if case.faults[-1].at.phase is phase]
    chance = random.Random(phase.value)
    assert any(run_case(case).struck == len(case.faults) for case in chance.sample(cases, 5))


def test_a_strike_between_two_meets_two():
    world = make_world(Case(5, ()))
    cut, suspected = [], []
    world.network.cut = lambda src, dst: cut.append((src, dst))
    struck = {}

    def strike_now():
        struck["process"] = process = world.living()[0]
        for other in world.living()[1:]:
            other.suspect = lambda seat, other=other: suspected.append((other.seat.rank, seat.rank))
        strike(Kind.HALF_OPEN, world, process)
        strike(Kind.SUSPECTED, world, process)

    world.after(0.1, strike_now)
    world.run()
    rank = struck["process"].seat.rank
    [(src, dst)] = cut
    assert src == rank != dst
    [(accuser, accused)] = suspected
    assert accused == rank != accuser


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_simulated_exchange_is_the_schedule_whatever_the_order_of_messages(algorithm, ranks):
    chance = random.Random(ranks)
    inputs = np.arange(ranks * 12).reshape(ranks, 12)
    tag = Tag(1, 1, 0, 0)
    walks = [Exchange(tag, range(ranks), rank, [inputs[rank].tolist()], algorithm) for rank in range(ranks)]
    under_way = [part for walk in walks for parts in walk.sends(0) for part in parts]
    while under_way:
        part = under_way.pop(chance.randrange(len(under_way)))
        walk = walks[part.dst]
        walk.receive(part)
        while walk.advance(0):
            under_way += [part for parts in walk.sends(0) for part in parts]
    assert [list(walk.result) for walk in walks] == run(by_name(algorithm, ranks), inputs).tolist()
    assert all(walk.done for walk in walks)


def test_a_ring_goes_around_broken_links_where_it_can():
    order = ring_order((0, 1, 2, 3), [(0, 1)])
    assert sorted(order) == [0, 1, 2, 3]
    assert abs(order.index(0) - order.index(1)) == 2
    assert ring_order((0, 1, 2), [(0, 1)]) == ()


def test_members_can_be_replayed(monkeypatch):
    told = []

    class Recorded(Member):
        def __init__(self, *given):
            super().__init__(*given)
            self.given, self.happened = given, []
            told.append(self)

        def handle(self, event):
            said = super().handle(event)
            self.happened.append((event, said))
            return said

    monkeypatch.setattr(simulated_process, "Member", Recorded)
    assert not run_case(Case(3, (Fault(Kind.ZOMBIE, 2, Point(Phase.MID_CHUNK, 1, 0, 3)),))).broken
    assert sum(len(member.happened) for member in told) > 100
    for member in told:
        again = Member(*member.given)
        assert [again.handle(event) for event, _ in member.happened] == [said for _, said in member.happened]


@pytest.mark.parametrize(
    "bounds", [Bounds(ranks=2, steps=2, crashes=1), Bounds(ranks=2, steps=1, crashes=0, mistakes=1)]
)
def test_every_state_of_a_small_job(bounds):
    found = explore(bounds)
    assert found.broken == ()
    assert found.complete
    assert found.states > 500


@pytest.mark.parametrize("rule", ["every_ack", "abort_first", "take_commit", "keep_copy", "read_first", "tagged_acks"])
def test_the_checker_notices_a_broken_rule(rule):
    bounds = Bounds(ranks=2, steps=2 if rule == "tagged_acks" else 1, crashes=0, mistakes=1)
    found = explore(bounds, Rules(**{rule: False}))
    assert found.broken
    assert found.broken[1] == "begin"


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(ranks=2, steps=1, crashes=0, foreign=True),
        Bounds(ranks=2, steps=1, crashes=1, returns=1, foreign=True, most_states=4000),  # `make prove` sees them all
        Bounds(ranks=2, steps=1, crashes=0, differences=2),
    ],
)
def test_nothing_comes_of_messages_of_others_and_nobody_goes_for_a_tie(bounds):
    assert explore(bounds).broken == ()


@pytest.mark.parametrize("rules_off", [{"all_come"}, {"keep_final"}])
def test_the_checker_finds_the_old_hole_where_a_rule_of_the_end_is_broken(rules_off):
    bounds = Bounds(ranks=2, steps=1, crashes=1, returns=1)
    broken = dict.fromkeys(rules_off, False)
    assert "cannot have the final state" in explore(bounds, Rules(**broken)).broken[0]
    untrained = explore(bounds, Rules(**broken, final_only=False)).broken[0]
    assert "does what comes after the last step with the state of step -1" in untrained


@pytest.mark.parametrize("phase", [Phase.LAST_APPLIED, Phase.KEPT, Phase.OVER, Phase.SAVING])
@pytest.mark.parametrize("rank", [0, 3])
def test_whoever_is_killed_around_the_end_runs_its_last_lines_with_the_final_state(phase, rank):
    assert not run_case(Case(1, (Fault(Kind.KILL, rank, Point(phase)),))).broken
    late = (Fault(Kind.KILL, 0, Point(Phase.COMPUTING, 4)), Fault(Kind.KILL, rank, Point(phase)))
    assert not run_case(Case(2, late)).broken
    assert not run_case(Case(3, (Fault(Kind.DRAINED, rank, Point(Phase.COMPUTING, 1)), *late))).broken


def test_without_the_rules_of_the_end_a_rank_that_comes_late_saves_an_untrained_model():
    late = Case(2, (Fault(Kind.KILL, 0, Point(Phase.BEFORE_APPLY, 4)),))
    result = run_case(late, Rules(all_come=False, final_only=False))
    assert "rank 0 (epoch 2) saves weights that lack or repeat 40 samples" in result.broken[LAST]
    assert not run_case(late).broken


def test_prove_prints_what_it_found(capsys, monkeypatch):
    monkeypatch.setattr("verification.survive.__main__.SMALL_JOBS", (Bounds(ranks=2, steps=1, crashes=0),))
    monkeypatch.setattr("verification.survive.__main__.LARGER_JOBS", (Bounds(ranks=1, steps=2, crashes=1),))
    monkeypatch.setattr("verification.survive.__main__.rule_names", lambda: ("read_first",))
    assert main(["--cases", "3", "--quiet", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["cases"], len(told["controls"])) == (True, 3, 1)
    assert main(["--cases", "3", "--quiet", "--json", "--far"]) == 0
    assert [job["bounds"]["ranks"] for job in json.loads(capsys.readouterr().out)["explored"]] == [2, 1]
    assert main(["--cases", "3", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("3 cases, 0 with a broken invariant")
    for title in ("cases by fault and phase", "each rule broken in turn", "every state of small jobs"):
        assert title in printed
    assert sum(kind.value in printed for kind in Kind) == len(Kind)
    assert main(["--cases", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
