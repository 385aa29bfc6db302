"""The state machine of a member, told one thing after the other."""

from dataclasses import dataclass, field

import pytest

from ringside.errors import UsageError
from ringside.survive.protocol import Member, MemberPhase
from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol.decision import Abort, Commit, MemberId, Tag
from ringside.survive.protocol.generation import Generation, MembershipChange, closing, successor
from ringside.survive.protocol.settings import ProtocolSettings

SEATS = tuple(MemberId(rank, 1) for rank in range(3))


@dataclass
class Job:
    """Members of one job and their registers; what they are told to do is kept, calls to registers are answered."""

    settings: ProtocolSettings = field(
        default_factory=lambda: ProtocolSettings(6, lambda step: (6 * step, 6), most_attempts=4)
    )
    records: dict[int, Generation] = field(default_factory=dict)
    decisions: dict[tuple[int, int], object] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)
    said: list[tuple[int, i.Instruction]] = field(default_factory=list)
    now: float = 0.0

    def start(self, seat, step=None, founders=()):
        self.members[seat.rank] = Member(seat, 1, self.settings)
        self.tell(seat.rank, e.Started(self.now, step, founders))

    def founded(self):
        for seat in SEATS:
            self.start(seat, 0, SEATS)
        return self

    def tell(self, rank, event):
        """Tell a member something; carry out what it wants of registers, and note the rest."""
        for instruction in self.members[rank].handle(event):
            match instruction:
                case i.ReadGeneration():
                    self.tell(rank, e.GenerationRead(self.records.get(1)))
                case i.ProposeGeneration(expected, new):
                    if self.records.get(1) == expected:
                        self.records[1] = new
                    self.tell(rank, e.GenerationRead(self.records[1]))
                case i.TryCommit(tag, decision):
                    self.create(rank, tag, decision)
                case i.TryAbort(tag, generation):
                    self.create(rank, tag, Abort(generation))
                case i.EndGeneration(_, number, by):
                    after = max((step for step, of in self.decisions if of == number), default=-1) + 1
                    self.decisions.setdefault((after, number), Abort(by))
                    self.tell(rank, e.GenerationEnded(number))
                case i.ReadDecision(tag):
                    self.tell(rank, e.DecisionRead(tag, self.decisions.get((tag.step, tag.generation))))
                case _:
                    self.said.append((rank, instruction))

    def create(self, rank, tag, decision):
        stands = self.decisions.setdefault((tag.step, tag.generation), decision)
        self.tell(rank, e.DecisionRead(tag, stands))

    def tick(self, *ranks, after_s=0.1):
        self.now += after_s
        for rank in ranks:
            self.tell(rank, e.Tick(self.now))

    def work(self, *ranks, digests=None):
        """Let members compute and exchange; each has its private copy then."""
        for rank in ranks:
            tag = self.members[rank].tag
            self.tell(rank, e.WorkDone(tag))
            self.tell(rank, e.ResultReady(tag, (digests or {}).get(rank, "sum"), "state"))

    def keep(self, *ranks, digests=None):
        """Let members keep the final state."""
        for rank in ranks:
            self.tell(rank, e.StateKept(self.members[rank].tag, (digests or {}).get(rank, "final")))

    def phases(self):
        return [self.members[rank].phase for rank in sorted(self.members)]

    def deliver(self, *ranks):
        """Hand the acknowledgements of some members to the leader."""
        for rank, instruction in list(self.said):
            if isinstance(instruction, i.PublishAck) and rank in ranks:
                self.tell(instruction.to.rank, e.AckSeen(instruction.ack))

    def of(self, kind, rank=None):
        return [what for who, what in self.said if isinstance(what, kind) and rank in (None, who)]

    def steps(self):
        return {rank: member.step for rank, member in self.members.items()}


def test_a_healthy_step_is_applied_by_all_once_all_have_acknowledged():
    job = Job().founded()
    assert [what.micro_batches for what in job.of(i.Compute)] == [(0, 1), (2, 3), (4, 5)]
    job.work(0, 1, 2)
    job.deliver(1)
    assert not job.decisions
    job.deliver(2)
    assert job.decisions[0, 1] == Commit(SEATS, 0, 6, 6, "sum")
    job.tick(1, 2)
    assert job.steps() == {0: 1, 1: 1, 2: 1}
    assert len(job.of(i.Apply)) == 3


def test_a_leader_that_wakes_up_late_finds_abort():
    job = Job().founded()
    job.work(0, 1, 2)
    job.tell(1, e.PeerSuspected(SEATS[0]))
    job.tick(2)
    assert job.records[1].members == SEATS[1:]
    assert isinstance(job.decisions[0, 1], Abort)
    job.deliver(1, 2)  # now the leader knows of all acknowledgements
    job.tick(0)
    assert not job.of(i.Apply)
    assert job.of(i.Leave, 0) == [i.Leave("generation 2 goes on without rank 0 (epoch 1)")]
    assert [what.tag for what in job.of(i.Discard)] == [Tag(1, 1, 0, 0)] * 3
    assert job.of(i.Compute, 1)[-1].micro_batches == (0, 2, 3)  # its own, and what rank 0 owed


def test_commit_of_a_leader_that_told_nobody_is_taken():
    job = Job().founded()
    job.work(0, 1, 2)
    job.deliver(1, 2)
    job.tell(2, e.PeerSuspected(SEATS[0]))
    job.tick(1)
    assert job.steps() == {0: 1, 1: 1, 2: 1}
    assert {what.tag.step for what in job.of(i.Discard)} == {1}  # begun in the old generation, and nothing more
    assert job.members[1].tag == job.members[2].tag == Tag(1, 2, 1, 1)


def test_a_member_that_is_one_step_behind_catches_up_before_it_goes_on():
    job = Job().founded()
    job.work(0, 1, 2)
    job.deliver(1, 2)
    job.tick(1)
    job.tell(1, e.PeerSuspected(SEATS[0]))  # 1 is at step 1, 2 has not read that step 0 is committed
    assert job.steps() == {0: 1, 1: 1, 2: 0}
    job.tick(2)
    assert job.members[1].tag == job.members[2].tag == Tag(1, 2, 1, 0)
    assert isinstance(job.decisions[1, 1], Abort)


def test_two_who_suspect_others_at_once_agree_on_both():
    job = Job().founded()
    stale = job.records[1]
    job.tell(0, e.PeerSuspected(SEATS[2]))
    job.members[1].newest = stale  # has not heard of it yet
    job.tell(1, e.PeerSuspected(SEATS[0]))
    assert job.records[1].members == (SEATS[1],)
    assert job.records[1].number == 3
    job.tick(0)
    assert job.of(i.Leave, 0)


def test_acknowledgements_of_another_attempt_or_of_strangers_count_for_nothing():
    job = Job().founded()
    job.work(0, 1)
    job.deliver(1)
    for seat, tag in [(SEATS[2], Tag(1, 0, 0, 0)), (MemberId(2, 9), Tag(1, 1, 0, 0)), (SEATS[2], Tag(2, 1, 0, 0))]:
        job.tell(0, e.AckSeen(e.Acknowledgement(tag, seat, "sum", "state")))
    assert not job.decisions


def test_an_acknowledgement_of_another_incarnation_does_not_hide_the_one_that_is_meant():
    job = Job().founded()
    job.tell(0, e.AckSeen(e.Acknowledgement(Tag(2, 1, 0, 0), SEATS[2], "sum", "state")))
    job.work(0, 1, 2)
    job.deliver(1, 2)
    assert job.decisions[0, 1] == Commit(SEATS, 0, 6, 6, "sum")


def test_of_two_halves_with_different_results_neither_goes():
    seats = (*SEATS, MemberId(3, 1))
    job = Job(ProtocolSettings(8, lambda step: (8 * step, 8), most_attempts=4))
    for seat in seats:
        job.start(seat, 0, seats)
    for attempt in range(3):
        assert (job.records[1].members, job.records[1].attempt) == (seats, attempt)
        job.work(0, 1, 2, 3, digests={2: "other", 3: "other"})
        job.deliver(1, 2, 3)
        job.tick(1, 2, 3)


def test_different_results_are_tried_again_and_then_the_odd_one_goes():
    job = Job().founded()
    job.work(0, 1, 2, digests={2: "odd"})
    job.deliver(1, 2)
    job.tick(1, 2)
    assert job.records[1].attempt == 1
    assert job.records[1].members == SEATS
    job.work(0, 1, 2, digests={2: "odd"})
    job.deliver(1, 2)
    job.tick(1, 2)
    assert job.records[1].members == SEATS[:2]
    assert job.of(i.Leave, 2)
    assert not job.of(i.Apply)


def test_a_step_that_never_works_halts_the_job():
    job = Job().founded()
    for _ in range(4):
        job.tell(0, e.WorkDone(job.members[0].tag))
        job.tell(0, e.AttemptFailed(job.members[0].tag))
    assert "step 0 was begun 4 times in vain" in job.of(i.Halt, 0)[0].reason
    assert job.members[0].phase is MemberPhase.ENDED


def test_a_link_that_carries_nothing_is_gone_around_by_the_same_members():
    job = Job().founded()
    job.tell(1, e.WorkDone(job.members[1].tag))
    job.tell(1, e.AttemptFailed(job.members[1].tag, (), ((0, 1),)))
    assert job.records[1].broken == ((0, 1),)
    assert job.records[1].members == SEATS


def test_whoever_comes_back_is_not_gone_around_because_of_a_link_of_the_one_that_went():
    job = Job().founded()
    job.tell(1, e.WorkDone(job.members[1].tag))
    job.tell(1, e.AttemptFailed(job.members[1].tag, (), ((0, 1),)))
    job.tick(0, 2)
    back = MemberId(1, 2)
    job.tell(0, e.JoinRequested(back))
    assert job.records[1].members == (SEATS[0], back, SEATS[2])
    assert job.records[1].broken == ()


def joined(job):
    """Rank 2 dies and comes back with a new epoch; it has been offered state, and fetches it."""
    back = MemberId(2, 2)
    job.start(back)
    job.tell(0, e.JoinRequested(back))
    job.tick(1, 2)
    (offer,) = job.of(i.OfferState, 0)
    job.tell(2, e.StateOffered(e.RankOffered(offer.tag, SEATS[0], "state")))
    return offer.tag


def test_who_comes_back_replaces_who_went_and_begins_with_verified_state():
    job = Job().founded()
    tag = joined(job)
    assert job.records[1].members == (*SEATS[:2], MemberId(2, 2))
    assert job.records[1].joining == (2,)
    job.tell(2, e.StateFetched(tag, "torn"))
    assert job.members[2].phase is MemberPhase.FETCHING
    job.tell(2, e.StateOffered(e.RankOffered(tag, SEATS[1], "state")))
    job.tell(2, e.StateFetched(tag, "state"))
    assert job.of(i.Compute, 2)[-1] == i.Compute(tag, (4, 5), check_state=True)
    job.work(0, 1, 2)
    job.deliver(1, 2)
    job.tick(1, 2)
    assert job.steps() == {0: 1, 1: 1, 2: 1}


def test_a_joiner_takes_no_state_of_whoever_is_no_member():
    job = Job().founded()
    back = MemberId(2, 2)
    job.start(back)
    job.tell(0, e.JoinRequested(back))
    job.tick(1, 2)
    tag = job.of(i.OfferState, 0)[0].tag
    for stranger in (
        MemberId(2, 1),
        MemberId(0, 2),
        MemberId(7, 1),
    ):  # itself as it was, a member as it is not yet, nobody
        job.tell(2, e.StateOffered(e.RankOffered(tag, stranger, "state")))
    assert job.of(i.FetchState) == []
    job.tell(2, e.StateOffered(e.RankOffered(tag, SEATS[1], "state")))
    assert job.of(i.FetchState) == [i.FetchState(SEATS[1], tag, "state")]


def test_a_joiner_whose_helper_dies_is_helped_by_another():
    job = Job().founded()
    tag = joined(job)
    job.tell(1, e.PeerSuspected(SEATS[0]))
    job.tick(1, 2)
    assert job.records[1].joining == (2,)
    job.tell(2, e.StateFetched(tag, "state"))  # of a generation that is over
    assert job.members[2].phase is MemberPhase.FETCHING
    job.tell(1, e.JoinRequested(MemberId(2, 2)))
    offer = job.of(i.OfferState, 1)[-1]
    assert offer.tag.generation == job.records[1].number
    job.tell(2, e.StateOffered(e.RankOffered(offer.tag, SEATS[1], "state")))
    job.tell(2, e.StateFetched(offer.tag, "state"))
    assert job.members[2].tag == job.members[1].tag


def test_a_request_to_join_that_comes_late_brings_nobody_back():
    job = Job().founded()
    joined(job)
    job.tell(0, e.PeerSuspected(MemberId(2, 2)))
    for late in (MemberId(2, 2), MemberId(2, 1)):
        job.tell(1, e.JoinRequested(late))
        job.tell(0, e.JoinRequested(late))
    job.tick(0, 1)
    job.work(0, 1)
    job.deliver(1)
    job.tick(1)
    assert job.records[1].members == SEATS[:2]
    assert job.records[1].left == (MemberId(2, 2),)
    job.tell(0, e.JoinRequested(MemberId(2, 3)))
    job.work(0, 1)
    job.deliver(1)
    assert job.records[1].members == (*SEATS[:2], MemberId(2, 3))
    assert job.records[1].left == ()


def test_newcomers_wait_for_a_committed_step_so_that_there_is_one():
    job = Job().founded()
    job.tell(0, e.JoinRequested(MemberId(3, 1)))
    job.tell(1, e.PeerSuspected(SEATS[2]))
    job.tick(0)
    assert job.records[1].members == SEATS[:2]
    job.work(0, 1)
    job.deliver(1)
    assert job.records[1].members == (*SEATS[:2], MemberId(3, 1))
    assert job.steps()[0] == 1


def test_drains_and_quotas_wait_until_a_step_is_done():
    job = Job().founded()
    job.tell(0, e.QuotasWanted(((0, 4), (1, 1), (2, 1))))
    assert job.records[1].number == 1
    job.work(0, 1, 2)
    job.deliver(1, 2)
    job.tick(1, 2)
    assert job.records[1].owners == (0, 0, 1, 0, 2, 0)
    assert len(job.of(i.Apply)) == 3
    job.tell(0, e.DrainWanted(2))
    job.work(0, 1, 2)
    job.deliver(1, 2)
    job.tick(1, 2)
    (left,) = job.of(i.Leave, 2)
    assert "was drained" in left.reason
    assert job.records[1].number == 3
    job.start(MemberId(2, 2))
    job.tick(2)
    assert job.of(i.AskToJoin, 2) == []  # it waits until the job ends


def test_impatience_falls_on_who_did_not_acknowledge_and_on_a_silent_leader():
    job = Job().founded()
    job.work(0, 1)
    job.deliver(1)
    job.tick(0, after_s=2.5)
    assert job.records[1].members == SEATS[:2]
    job = Job().founded()
    job.work(1, 2)
    job.tick(1, after_s=2.5)
    assert job.records[1].number == 1
    job.tick(1, after_s=2.5)
    assert job.records[1].members == SEATS[1:]


def ending(steps=1, **settings):
    """Return a job of three ranks whose last step all have applied."""
    job = Job(ProtocolSettings(6, lambda step: (6 * step, 6), steps=steps, ranks=3, **settings)).founded()
    job.work(0, 1, 2)
    job.deliver(1, 2)
    job.tick(1, 2)
    assert job.phases() == [MemberPhase.KEEPING] * 3
    return job


def test_the_job_is_over_when_every_rank_has_kept_the_same_state():
    job = ending()
    job.keep(0, 1)
    job.deliver(1)
    job.tick(0, 1)
    assert job.of(i.Finish) == []
    job.keep(2)
    job.deliver(2)
    assert (job.records[1].over, job.records[1].final, job.records[1].without) == (True, "final", ())
    job.tick(1, 2)
    assert job.of(i.Finish) == [i.Finish("final")] * 3
    job.start(MemberId(2, 2))  # what it has kept decides whether it goes on
    assert job.of(i.Finish, 2)[1:] == [i.Finish("final")]


def test_who_comes_at_the_end_is_let_in_and_gets_the_final_state():
    job = ending()
    job.keep(0, 1)
    job.deliver(1)
    job.tell(0, e.PeerSuspected(SEATS[2]))
    assert job.records[1].members == SEATS[:2]
    job.tick(1)
    job.keep(0, 1)
    job.deliver(1)
    job.tick(0, 1)
    assert not job.records[1].over  # rank 2 is awaited
    job.start(MemberId(2, 2))
    job.tell(0, e.JoinRequested(MemberId(2, 2)))
    job.tick(0, 1, 2)
    assert (job.records[1].members, job.records[1].joining) == ((*SEATS[:2], MemberId(2, 2)), (2,))
    tag = job.members[0].tag
    job.tell(2, e.StateOffered(e.RankOffered(tag, SEATS[0], "final")))
    job.tell(2, e.StateFetched(tag, "final"))
    job.keep(0, 1, 2)
    job.deliver(1, 2)
    job.tick(1, 2)
    assert job.of(i.Finish) == [i.Finish("final")] * 3


@pytest.mark.parametrize("gone", [True, False])
def test_a_rank_that_does_not_come_is_named_and_one_of_which_nobody_knows_is_waited_for(gone):
    job = ending(end_patience_s=200.0)
    job.tell(1, e.PeerSuspected(SEATS[0]))
    job.tick(2)
    job.keep(1, 2)
    job.deliver(2)
    job.tick(1)
    assert job.of(i.Finish) == []
    if gone:
        job.tell(1, e.RanksGone((0,)))
    else:
        job.tick(1, after_s=250.0)
    job.tick(2)
    assert job.of(i.Finish) == [i.Finish("final", (0,))] * 2


def test_different_final_states_are_not_the_end():
    job = ending()
    job.keep(0, 1, 2, digests={2: "other"})
    job.deliver(1, 2)
    assert (job.records[1].over, job.records[1].attempt) == (False, 0)
    for rank in (1, 2):
        job.tick(rank)
    job.keep(0, 1, 2, digests={2: "other"})
    job.deliver(1, 2)
    assert job.records[1].attempt == 1
    assert (job.records[1].over, job.records[1].members) == (False, SEATS) or job.records[1].members == SEATS[:2]


def test_whoever_was_drained_comes_back_at_the_end():
    job = Job(ProtocolSettings(6, lambda step: (6 * step, 6), steps=2, ranks=3)).founded()
    job.tell(0, e.DrainWanted(2))
    job.work(0, 1, 2)
    job.deliver(1, 2)
    job.tick(1, 2)
    job.start(MemberId(2, 2))
    assert job.records[1].drained == (2,)
    job.work(0, 1)
    job.deliver(1)
    job.tick(0, 1, 2)
    assert (job.records[1].drained, job.records[1].last) == ((), 2)
    assert job.of(i.AskToJoin, 2)


def test_a_rank_that_wants_no_further_step_ends_the_job_with_the_state_it_has():
    job = Job(ProtocolSettings(6, lambda step: (6 * step, 6), ranks=3)).founded()
    job.work(0, 1, 2)
    job.deliver(1, 2)
    job.tick(1, 2)
    job.tell(1, e.EndWanted())
    job.tick(0, 2)
    assert job.records[1].last == 1
    assert job.phases() == [MemberPhase.KEEPING] * 3
    assert {member.step for member in job.members.values()} == {1}


def test_without_the_store_who_has_the_final_state_is_at_the_end():
    job = ending()
    job.keep(1)
    member = job.members[1]
    member.unanswered = job.now
    assert member.handle(e.Tick(job.now + 31.0)) == [i.Finish("")]


def test_a_silent_store_halts_the_job():
    member = Member(SEATS[0], 1, Job().settings)
    member.handle(e.Started(0.0, 0, SEATS))
    assert [type(said) for said in member.handle(e.Tick(29.0))] == [i.ReadGeneration, i.AskToJoin]
    (said,) = member.handle(e.Tick(31.0))
    assert isinstance(said, i.Halt)
    assert "store has not answered for 30 s" in said.reason


def test_an_incarnation_is_given_up_only_when_nothing_can_be_committed_in_it():
    job = Job().founded()
    job.work(0, 1, 2)
    back = MemberId(1, 2)
    job.start(back)
    job.tell(1, e.NobodyLeft())
    assert job.records[1].closed
    assert job.of(i.OpenIncarnation, 1) == [i.OpenIncarnation(2)]
    job.deliver(1, 2)  # rank 0 wakes up with all acknowledgements
    assert isinstance(job.decisions[0, 1], Abort)
    assert not job.of(i.Apply)
    job.tick(0)
    assert job.of(i.Leave, 0)


def test_a_fence_ends_every_generation_in_which_a_step_could_be_committed_with_one_call_each():
    closed = Generation(1, 6, 10, unsettled=((4, 9), (5, 10)))
    member = Member(MemberId(3, 1), 1, Job().settings)
    member.handle(e.Started(0.0))
    assert member.handle(e.GenerationRead(closed)) == [i.EndGeneration(1, 4, 6)]
    assert member.handle(e.GenerationEnded(5)) == [i.EndGeneration(1, 4, 6)], "an answer that comes twice, or late"
    assert member.handle(e.GenerationEnded(5)) == []
    assert member.handle(e.GenerationEnded(4)) == [i.OpenIncarnation(2)]


def test_members_none_of_whom_brought_state_give_the_incarnation_up_after_a_while():
    settings = ProtocolSettings(2, lambda step: (2 * step, 2), patience_s=2.0)
    record = Generation(1, 3, 4, 0, SEATS[:2], (0, 1), joining=(0, 1))
    member = Member(SEATS[0], 1, settings)
    member.handle(e.Started(0.0))
    member.handle(e.GenerationRead(record))
    assert member.phase is MemberPhase.FETCHING
    assert member.handle(e.Tick(1.9)) == [i.ReadGeneration(), i.AskToJoin(SEATS[0])]
    assert member.handle(e.GenerationRead(record)) == []
    closed = closing(record)
    assert member.handle(e.Tick(2.1)) == [i.ReadGeneration(), i.ProposeGeneration(record, closed)]
    assert (closed.closed, closed.unsettled) == (True, ((3, 4),))


def test_a_founder_with_another_checkpoint_is_sent_to_fetch_state():
    job = Job()
    job.start(SEATS[0], 5, SEATS)
    job.start(SEATS[1], 4, SEATS)
    assert job.of(i.Leave, 1) == [i.Leave("rank 1 (epoch 1) has state of step 4, not 5")]


def test_generations_that_may_still_live_are_remembered():
    first = Generation(1, 1, 0, members=SEATS, owners=(0, 1, 2))
    lost = MembershipChange(suspects=frozenset({SEATS[2]}))
    second = successor(first, lost, 3, True)
    assert (second.unsettled, second.step, second.attempt) == (((1, 0),), 3, 0)
    third = successor(second, MembershipChange(again=True), 3, False)
    assert (third.unsettled, third.attempt) == (((1, 0), (2, 3)), 1)
    assert successor(second, MembershipChange(again=True), 4, True).unsettled == ((2, 3),)


def test_settings_that_make_no_sense_are_refused():
    for wrong in ({"micro_batches": 0}, {"micro_batches": 1, "retry_s": 9.0}, {"micro_batches": 1, "most_attempts": 0}):
        with pytest.raises(UsageError):
            ProtocolSettings(samples=lambda step: (0, 1), **wrong)
