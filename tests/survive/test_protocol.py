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
    assert (job.records[1].number, job.records[1].last) == (2, 1)
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
    assert member.handle(e.Tick(1.0))[-1:] == [i.EndGeneration(1, 4, 6)], "what is left is asked for again"
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


def test_what_is_told_of_another_attempt_or_at_another_moment_changes_nothing():
    member = Job().founded().members[1]
    now, later = member.tag, Tag(1, 2, 0, 0)
    assert member.handle(e.WorkDone(later)) == []
    assert member.handle(e.ResultReady(now, "sum", "state")) == [], "before its work is done"
    assert member.handle(e.StateKept(now, "final")) == []
    assert len(member.handle(e.WorkDone(now))) == 1
    assert member.handle(e.WorkDone(now)) == [], "a second time"
    assert member.handle(e.AttemptFailed(later)) == member.handle(e.ResultReady(later, "sum", "state")) == []
    ack = e.Acknowledgement(now, SEATS[1], "sum", "state")
    assert member.handle(e.ResultReady(now, "sum", "state")) == [i.PublishAck(ack, SEATS[0]), i.ReadDecision(now)]
    assert member.handle(e.ResultReady(now, "sum", "state")) == member.handle(e.AttemptFailed(now)) == []
    assert member.handle(e.NobodyLeft()) == [], "it has state itself"
    outside = Member(SEATS[0], 1, Job().settings)
    assert (outside.tag, outside.members, outside.is_leader) == (None, (), False)
    assert outside.handle(e.NobodyLeft()) == [], "it has read of no generation yet"
    assert outside.phase is MemberPhase.OUTSIDE


def test_only_founders_with_state_write_the_first_generation():
    for step, founders in ((None, SEATS), (0, SEATS[1:])):
        member = Member(SEATS[0], 1, Job().settings)
        assert member.handle(e.Started(0.0, step, founders)) == [i.ReadGeneration()]
        assert member.handle(e.GenerationRead(None)) == []


def test_a_leader_counts_and_tells_nobody_and_the_newest_acknowledgement_of_each_stands():
    job = Job().founded()
    leader, tag = job.members[0], Tag(1, 1, 0, 0)
    leader.handle(e.WorkDone(tag))
    assert leader.handle(e.ResultReady(tag, "sum", "state")) == []
    ahead = e.Acknowledgement(Tag(1, 1, 1, 0), SEATS[2], "sum")
    for ack in (ahead, e.Acknowledgement(ahead.tag, SEATS[2], "other"), e.Acknowledgement(tag, SEATS[2], "sum")):
        assert leader.handle(e.AckSeen(ack)) == [], "of the generation that it knows: nothing to read"
    leader.handle(e.AckSeen(e.Acknowledgement(tag, MemberId(7, 1), "sum", "state")))
    assert leader.acks.keys() == {SEATS[0], SEATS[2]}
    assert leader.acks[SEATS[2]] is ahead


def test_an_acknowledgement_from_a_later_generation_makes_the_leader_read_of_it_and_counts_there():
    job = Job().founded()
    job.tell(1, e.PeerSuspected(SEATS[2]))
    assert [what.gone for what in job.of(i.Settle, 1)] == [(), (SEATS[2],)]
    job.work(1)
    assert job.members[0].newest.number == 1
    job.deliver(1)
    assert job.members[0].newest.number == 2
    job.work(0)
    assert job.decisions[0, 2] == Commit(SEATS[:2], 0, 6, 6, "sum")


def test_a_step_that_is_settled_is_not_settled_twice_and_the_end_needs_no_settling():
    member = Job().founded().members[1]
    lost = successor(member.generation, MembershipChange(suspects=frozenset({SEATS[2]})), 0, True)
    assert member.handle(e.GenerationRead(lost)) == [i.TryAbort(Tag(1, 1, 0, 0), 2)]
    again = successor(lost, MembershipChange(again=True), 0, False)
    assert member.handle(e.GenerationRead(again)) == [], "that abort is under way"
    job = ending()
    job.keep(0, 1, 2)
    job.deliver(1, 2)
    assert job.members[1].handle(e.GenerationRead(job.records[1])) == [i.Finish("final")]


def test_a_commit_of_another_result_is_not_applied():
    for digest in (None, "other"):
        job = Job().founded()
        if digest:
            job.work(1, digests={1: digest})
        tag = Tag(1, 1, 0, 0)
        (said,) = job.members[1].handle(e.DecisionRead(tag, Commit(SEATS, 0, 6, 6, "sum")))
        assert said == i.Leave(f"{tag} is committed, and rank 1 (epoch 1) has another result")


def test_gradients_may_be_sums_and_every_other_step_is_saved_before_the_next_begins():
    job = Job(ProtocolSettings(6, lambda step: (6 * step, 6), mean=False, checkpoint_every=2)).founded()
    for step in range(4):
        job.work(0, 1, 2)
        job.deliver(1, 2)
        job.tick(1, 2)
        assert job.decisions[step, 1].divisor == 1
    told = [type(what).__name__ for who, what in job.said if who == 0 and not isinstance(what, i.RunExchange)]
    assert told == ["Settle", *["Compute", "Apply", "Compute", "Apply", "Checkpoint"] * 2, "Compute"]
    assert [what.step for what in job.of(i.Checkpoint, 0)] == [2, 4]


def test_patience_ends_after_and_not_at_its_time_and_the_leaders_comes_first():
    job = Job().founded()
    job.tick(0, 1, 2, after_s=8.0)
    job.work(0, 2)
    job.tick(0, after_s=2.0)
    assert job.records[1].number == 1
    job.tick(2, after_s=2.0)
    assert job.records[1].number == 1
    job.tick(2, after_s=0.5)
    assert job.records[1].members == SEATS[1:]
    job = Job().founded()
    job.tell(0, e.JoinRequested(back := MemberId(2, 2)))
    job.tick(0, 1, after_s=8.0)
    job.work(0, 1)
    job.deliver(1)
    job.tick(0, after_s=60.0)
    assert job.records[1].members == (*SEATS[:2], back), "it fetches the state"
    job.tick(0, after_s=0.5)
    assert job.records[1].members == SEATS[:2]


def test_once_the_first_step_is_done_nobody_fetches_and_patience_is_the_usual_one():
    job = Job().founded()
    tag = joined(job)
    job.tell(2, e.StateFetched(tag, "state"))
    job.work(0, 1, 2)
    job.deliver(1, 2)
    job.tick(1, 2)
    assert job.records[1].joining == (2,)
    assert job.members[0].handle(e.JoinRequested(MemberId(2, 2))) == [], "its state is not that of the beginning"
    job.work(0, 1)
    job.deliver(1)
    job.tick(0, after_s=2.5)
    assert job.records[1].members == SEATS[:2]


def test_what_can_wait_is_changed_by_the_leader_alone():
    job = Job().founded()
    job.tell(1, e.JoinRequested(MemberId(3, 1)))
    job.work(0, 1, 2)
    job.deliver(1, 2)
    job.tick(1, 2)
    assert (job.steps()[1], job.records[1].number) == (1, 1)


def test_the_job_halts_with_fewer_members_than_it_needs():
    job = Job(ProtocolSettings(6, lambda step: (6 * step, 6), least_members=2)).founded()
    job.tell(0, e.PeerSuspected(SEATS[2]))
    assert job.records[1].members == SEATS[:2]
    job.tell(0, e.PeerSuspected(SEATS[1]))
    assert "1 ranks are left and 2 are needed" in job.of(i.Halt, 0)[0].reason


def test_at_the_end_every_rank_may_come_and_go_as_often_as_a_step_is_tried():
    lost = e.PeerSuspected(SEATS[2])
    for ranks, attempt, halts in ((3, 4, False), (3, 5, True), (0, 0, False), (0, 1, True)):
        record = Generation(1, 9, 1, attempt, SEATS, (0, 0, 1, 1, 2, 2))
        member = Member(SEATS[0], 1, ProtocolSettings(6, lambda step: (0, 6), steps=1, ranks=ranks, most_attempts=2))
        member.handle(e.Started(0.0, 1))
        member.handle(e.GenerationRead(record))
        assert member.phase is MemberPhase.KEEPING
        said = member.handle(lost)
        assert [type(what) for what in said] == [i.Halt if halts else i.ProposeGeneration]
        assert member.handle(lost) == [], "a proposal is repeated by a tick only"


def test_an_end_is_not_proposed_while_a_step_may_be_committed_and_not_twice():
    job = Job(ProtocolSettings(6, lambda step: (6 * step, 6), ranks=3)).founded()
    job.work(1)
    assert job.members[1].handle(e.EndWanted()) == []
    job.work(0, 2)
    job.deliver(1, 2)
    job.tick(1)
    assert job.records[1].last == 1
    job.tick(0, 1, 2)
    assert job.phases() == [MemberPhase.KEEPING] * 3
    assert job.members[1].handle(e.EndWanted()) == []
    assert job.members[1].change.ends is False


def test_an_offer_is_taken_up_once_and_given_up_by_its_own_failure():
    job = Job().founded()
    tag = joined(job)
    joiner = job.members[2]
    assert joiner.handle(e.StateOffered(e.RankOffered(tag, SEATS[1], "state"))) == [], "one is enough"
    joiner.handle(e.FetchFailed(Tag(1, 1, 0, 0)))
    assert joiner.offer is not None
    joiner.handle(e.FetchFailed(tag))
    assert joiner.offer is None
    other = Tag(tag.incarnation, tag.generation, tag.step, tag.attempt + 1)
    assert joiner.handle(e.StateOffered(e.RankOffered(other, SEATS[1], "state"))) == []


def test_of_several_who_join_each_is_offered_state_and_none_offers_to_itself():
    record = Generation(1, 3, 4, 0, SEATS, (0, 0, 1, 1, 2, 2), joining=(1, 2))
    holder, joiner = Member(SEATS[0], 1, Job().settings), Member(SEATS[1], 1, Job().settings)
    holder.handle(e.Started(0.0, 4))
    assert i.OfferState(Tag(1, 3, 4, 0), (1, 2)) in holder.handle(e.GenerationRead(record))
    joiner.handle(e.Started(0.0))
    joiner.handle(e.GenerationRead(record))
    joiner.handle(e.StateOffered(e.RankOffered(Tag(1, 3, 4, 0), SEATS[0], "state")))
    joiner.handle(e.StateFetched(Tag(1, 3, 4, 0), "state"))
    assert joiner.handle(e.JoinRequested(SEATS[2])) == [i.OfferState(Tag(1, 3, 4, 0), (2,))]


def test_at_the_end_patience_ends_after_and_not_at_its_time():
    job = ending(end_patience_s=200.0)
    job.tell(1, e.PeerSuspected(SEATS[0]))
    job.tick(2)
    job.now = 1000.0
    for rank in (1, 2):
        job.tell(rank, e.Tick(1000.0))
    job.keep(1)
    job.tick(1, after_s=60.0)
    assert job.records[1].members == SEATS[1:]
    job.keep(2)
    job.deliver(2)
    job.tick(1, after_s=140.0)
    assert not job.records[1].over, "rank 0 may come"
    job.tick(1, after_s=0.5)
    assert (job.records[1].over, job.records[1].without) == (True, (0,))
    job = ending(end_patience_s=200.0)
    job.keep(2)
    job.tick(2, after_s=320.0)
    assert job.records[1].members == SEATS
    job.tick(2, after_s=0.5)
    assert job.records[1].members == SEATS[1:]
    job = ending()
    job.keep(0)
    job.tick(0, after_s=60.5)
    assert job.records[1].members == SEATS[:1], "who has not acknowledged is suspected by the leader"


def test_with_time_what_was_not_answered_is_asked_again_and_a_store_may_take_its_patience():
    member = Member(SEATS[0], 1, ProtocolSettings(6, lambda step: (0, 6), retry_s=0.25, store_patience_s=4.0))
    member.handle(e.Started(8.0))
    assert member.handle(e.Tick(8.125)) == [i.ReadGeneration(), i.AskToJoin(SEATS[0])]
    assert member.handle(e.Tick(8.25)) == []
    assert member.handle(e.Tick(8.375)) == [i.ReadGeneration(), i.AskToJoin(SEATS[0])]
    assert len(member.handle(e.Tick(12.0))) == 2, "since 8.0, and not longer than 4 s"
    member.handle(e.GenerationRead(None))
    assert len(member.handle(e.Tick(20.0))) == 2, "it has answered"
    assert isinstance(member.handle(e.Tick(24.5))[0], i.Halt)


def test_members_without_state_wait_their_whole_patience_and_as_long_as_one_is_offered():
    record = Generation(1, 3, 4, 0, SEATS[:2], (0, 1), joining=(0, 1))
    member = Member(SEATS[0], 1, ProtocolSettings(2, lambda step: (2 * step, 2), patience_s=2.0))
    member.handle(e.Started(0.0))
    member.handle(e.Tick(4.0))
    member.handle(e.GenerationRead(record))
    assert member.handle(e.Tick(6.0)) == [i.ReadGeneration(), i.AskToJoin(SEATS[0])]
    member.handle(e.StateOffered(e.RankOffered(Tag(1, 3, 4, 0), SEATS[1], "state")))
    assert member.handle(e.Tick(7.0)) == [i.ReadGeneration(), i.AskToJoin(SEATS[0])]
    member.handle(e.FetchFailed(Tag(1, 3, 4, 0)))
    assert isinstance(member.handle(e.Tick(8.0))[1], i.ProposeGeneration)


def test_who_joins_has_state_only_once_a_step_was_committed_where_it_joined():
    base = Generation(1, 3, 10, 2, SEATS, (0, 1, 2), joining=(2,), broken=((0, 1), (1, 2)), left=(MemberId(3, 4),))
    again = MembershipChange(again=True)
    for step, settled, joining, attempt in (
        (10, True, (2,), 3), (11, True, (2,), 0), (12, True, (), 0), (12, False, (2,), 0), (None, False, (2,), 3),
    ):  # fmt: skip
        following = successor(base, again, step, settled)
        assert (following.joining, following.attempt, following.step) == (joining, attempt, step or 10)
        assert following.broken == base.broken
    back = MembershipChange(newcomers=frozenset({MemberId(0, 2), MemberId(3, 5), MemberId(3, 4)}))
    following = successor(base, back, 12, True)
    assert following.members == (MemberId(0, 2), *SEATS[1:], MemberId(3, 5))
    assert (following.joining, following.broken, following.left) == ((0, 3), ((1, 2),), ())
    assert following.owners == (0, 1, 2), "four ranks share three: the first three keep theirs"


def test_a_change_is_due_only_where_it_changes_something():
    base = Generation(1, 3, 10, 0, SEATS, (0, 0, 1, 1, 2, 2), broken=((0, 1),), drained=(5,), left=(MemberId(3, 4),))
    same, other = ((0, 2), (1, 2), (2, 2)), ((0, 3), (1, 2), (2, 1))
    for patient, change in (
        (False, MembershipChange(drains=frozenset({4}), quotas=same)),
        (True, MembershipChange(drains=frozenset({2}))),
        (True, MembershipChange(quotas=other)),
        (False, MembershipChange(quotas=other[:2])),
        (False, MembershipChange(newcomers=frozenset({MemberId(3, 4), MemberId(5, 1), SEATS[0]}))),
        (True, MembershipChange(newcomers=frozenset({MemberId(3, 5)}))),
        (True, MembershipChange(newcomers=frozenset({MemberId(4, 0)}))),
        (False, MembershipChange(newcomers=frozenset({MemberId(4, 0)}), drains=frozenset({4}))),
        (False, MembershipChange(newcomers=frozenset({MemberId(4, 0)}), suspects=frozenset({MemberId(4, 0)}))),
    ):
        assert (change.patient(base), change.urgent(base)) == (patient, False), change
    assert MembershipChange(broken=frozenset({(0, 1)})).urgent(base) is False
    assert MembershipChange(broken=frozenset({(0, 2)})).urgent(base) is True
    assert MembershipChange(newcomers=frozenset({MemberId(0, 2)})).lost(base) == {SEATS[0]}
    wanted = MembershipChange(
        suspects=frozenset({SEATS[1], MemberId(1, 0), MemberId(6, 1)}),
        newcomers=frozenset({MemberId(3, 4), MemberId(6, 1)}),
        drains=frozenset({2, 5}),
        broken=frozenset({(0, 1), (0, 2), (0, 6)}),
        quotas=other,
        again=True,
        ends=True,
    )
    assert wanted.left_after(base) == MembershipChange(
        frozenset({SEATS[1], MemberId(6, 1)}), frozenset({MemberId(6, 1)}), frozenset({2}), frozenset({(0, 2)}), other,
        ends=True,
    )  # fmt: skip
    assert MembershipChange(quotas=same).left_after(base).quotas == ()


def test_the_last_step_is_set_once_and_whoever_was_drained_is_let_in_then():
    base = Generation(1, 3, 10, 0, SEATS, (0, 1, 2), drained=(4,))
    more = MembershipChange(drains=frozenset({2}))
    assert successor(base, more, 11, True).drained == (2, 4)
    ends = MembershipChange(ends=True)
    assert (successor(base, ends, 11, True).last, successor(base, ends, 11, True).drained) == (11, ())
    assert (successor(base, ends, 11, False).last, successor(base, ends, 11, False).drained) == (None, (4,))
    over = Generation(1, 4, 11, 0, SEATS, (0, 1, 2), last=11)
    assert successor(over, ends, 12, True).last == 11
    assert successor(over, more, 12, True).drained == ()


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
