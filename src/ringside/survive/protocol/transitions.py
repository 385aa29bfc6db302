"""What a member does about each event: one function per event, and those that they share. No I/O.

In the order in which a job goes through them: generations follow each other, a step is computed and exchanged, members
vote on its result, the decision is applied; then what changes the membership, how a process joins, how the job ends,
and how an incarnation is given up. `__init__.py` has the tables that lead here, and tells why it is right;
"rule N" in the comments is one of its numbered reasons.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol.decision import Commit, MemberId, Tag
from ringside.survive.protocol.generation import Generation, closing, ending, successor
from ringside.survive.protocol.settings import equal_quotas
from ringside.survive.protocol.state import Instructions, MemberPhase, MemberState

# -------------------------------------------------------------------------------------------------
# Generations follow each other: founding the first one, and going from one into a later one.


def started(member: MemberState, event: e.Started) -> Instructions:
    """The process is up."""
    member.now, member.step, member.founders = event.now, event.step, event.founders
    return [i.ReadGeneration()]


def generation_read(member: MemberState, event: e.GenerationRead) -> Instructions:
    """The generation register was read: found the first generation, or go on into a later one."""
    member.unanswered = None
    record = event.generation
    if record is None:
        # An empty register: founders write generation 1, with equal quotas; all of them propose the same record.
        if member.step is None or member.seat not in member.founders:
            return []
        ranks = tuple(seat.rank for seat in member.founders)
        quotas = equal_quotas(ranks, member.settings.micro_batches)
        owners = tuple(rank for rank, quota in zip(ranks, quotas, strict=True) for _ in range(quota))
        return [i.ProposeGeneration(None, Generation(member.incarnation, 1, member.step, 0, member.founders, owners))]
    if member.newest is not None and record.number <= member.newest.number:
        return []
    member.newest, member.proposal, member.change = record, None, member.change.left_after(record)

    # A later generation stands. What is open in the own one is settled before it is entered (rule 2).
    if record.over and member.phase in (MemberPhase.KEEPING, MemberPhase.CLOSING):
        return member.end(i.Finish(record.final, record.without))
    if member.phase is MemberPhase.RESOLVING:
        return []  # the step is being aborted already; the newest generation is entered after that
    if member.generation is None or member.step is None:
        return _enter_generation(member)
    member.enter_phase(MemberPhase.RESOLVING)
    return _abort_step(member)


def _abort_step(member: MemberState) -> Instructions:
    """Try to win ABORT for the step at hand in the generation in force; the register may hold COMMIT already."""
    tag, record = member.tag, member.newest
    assert tag is not None
    assert record is not None
    return [i.TryAbort(tag, record.number)]


def abort_again(member: MemberState) -> Instructions:
    """Repeat what settles the step in the old generation; members may be lost meanwhile."""
    return [*propose_change(member), *_abort_step(member)]


def _enter_generation(member: MemberState) -> Instructions:
    """Go into the newest generation: nothing is open in the one before."""
    record, before = member.newest, member.generation
    assert record is not None
    if not member.is_among(record.members):
        return _stay_outside(member, record)
    if before is None and member.step is not None and member.step != record.step:
        reason = f"{member.seat} has state of step {member.step}, not {record.step}"
        return member.end(i.Leave(reason))
    member.generation, member.own, member.offer = record, None, None
    member.acks = {seat: ack for seat, ack in member.acks.items() if seat in record.members}
    gone = () if before is None else tuple(sorted(set(before.members) - set(record.members)))
    settled: Instructions = [i.Settle(record, gone)]
    if member.step is None:
        member.enter_phase(MemberPhase.FETCHING)
        return [*settled, *propose_change(member)]
    # `entered_at` marks the one step during which this member's state may be offered to joiners (rule 4).
    member.phase, member.entered_at = MemberPhase.WORKING, member.step
    return [*settled, *_offer_state(member), *_begin_step(member)]


def _stay_outside(member: MemberState, record: Generation) -> Instructions:
    """The newest generation does not name this process: end, give the incarnation up, or ask to join."""
    if record.over:
        return member.end(i.Finish(record.final, record.without))
    if member.generation is not None and member.seat.rank in record.drained:
        return member.end(i.Leave("this rank was drained as a straggler: it waits until the job ends"))
    if record.closed and member.step is None:
        member.phase, member.fence = MemberPhase.FENCING, tuple(number for number, _ in record.unsettled)
        return _end_next_generation(member)
    # Who was a member once never is again under this seat (rule 5): a new epoch is claimed.
    if member.generation is not None or member.seat in record.left:
        return member.end(i.Leave(f"generation {record.number} goes on without {member.seat}"))
    member.phase, member.step = MemberPhase.OUTSIDE, None  # a founder that came too late joins like anybody
    return ask_to_join(member)


# -------------------------------------------------------------------------------------------------
# A step from its beginning to its exchange.


def _begin_step(member: MemberState, between_steps: bool = False) -> Instructions:
    """Begin the step, or keep the final state after the last one.

    Args:
        member: Whose step.
        between_steps: A step was just applied: the leader makes the changes that can wait until then. It does not when
            a generation begins: a rank that comes and goes again and again would keep the others from every step.
    """
    tag, record = member.tag, member.generation
    assert tag is not None
    assert record is not None
    if member.has_last:
        # Drained ranks are let in once more, to get the final state: `ends` lets `successor` empty `drained`.
        member.enter_phase(MemberPhase.KEEPING)
        member.change = replace(member.change, drains=frozenset(), quotas=(), ends=bool(record.drained))
        return [*propose_change(member), i.KeepState(tag)]
    member.enter_phase(MemberPhase.WORKING)
    own = record.micro_batches_of(member.seat.rank)
    # In a generation's first step all acknowledge their state as well: it must be equal, fetched or not.
    return [*propose_change(member, between_steps), i.Compute(tag, own, member.step == member.entered_at)]


def work_done(member: MemberState, event: e.WorkDone) -> Instructions:
    """Own micro-batches are computed: all-reduce."""
    if event.tag != member.tag or member.phase is not MemberPhase.WORKING or member.generation is None:
        return []
    member.enter_phase(MemberPhase.EXCHANGING)
    return [i.RunExchange(event.tag, member.generation)]


# -------------------------------------------------------------------------------------------------
# A result is here: members acknowledge their private copies, and the leader counts (two-phase commit, whose
# coordinator writes into a register instead of into a log of its own).


def result_ready(member: MemberState, event: e.ResultReady) -> Instructions:
    """The private copy is made: acknowledge it."""
    if event.tag != member.tag or member.phase is not MemberPhase.EXCHANGING:
        return []
    member.enter_phase(MemberPhase.VOTING)
    member.own = e.Acknowledgement(event.tag, member.seat, event.digest, event.state)
    member.acks = {**member.acks, member.seat: member.own}
    return _publish_ack(member)


def _publish_ack(member: MemberState) -> Instructions:
    """Send the acknowledgement to the leader, and look for the decision if there is to be one; the leader counts."""
    assert member.own is not None
    assert member.generation is not None
    if member.is_leader:
        return [*_commit_if_unanimous(member), *_end_job_if_all_kept(member)]
    look = [i.ReadDecision(member.own.tag)] if member.phase is MemberPhase.VOTING else []
    return [i.PublishAck(member.own, member.generation.leader), *look]


def ack_seen(member: MemberState, event: e.AckSeen) -> Instructions:
    """Another member holds a private copy, or has kept the final state."""
    ack, newest = event.ack, member.newest
    known = member.acks.get(ack.seat)
    # Not news: of another incarnation, or older than what is known (tags grow with every attempt).
    if newest is None or ack.tag.incarnation != member.incarnation or (known and known.tag >= ack.tag):
        return []
    if ack.seat not in (*member.members, *newest.members):
        return []
    member.acks = {**member.acks, ack.seat: ack}
    newer = ack.tag.generation > newest.number
    return [*([i.ReadGeneration()] if newer else []), *_commit_if_unanimous(member), *_end_job_if_all_kept(member)]


def _commit_if_unanimous(member: MemberState) -> Instructions:
    """COMMIT, once the leader knows that every member holds the same private copy (rule 1)."""
    tag = member.tag
    if member.phase is not MemberPhase.VOTING or not member.is_leader or tag is None or member.own is None:
        return []
    if _late(member):
        return []
    votes = {seat: (ack.digest, ack.state) for seat, ack in member.acks.items() if ack.tag == tag}
    if len(set(votes.values())) > 1:
        return _outvote(member, votes)
    return [i.TryCommit(tag, _commit_of(member, tag, member.own.digest))]


def _outvote(member: MemberState, votes: dict[MemberId, str] | dict[MemberId, tuple[str, str]]) -> Instructions:
    """Members differ: try the step once more; the second time the minority leaves, and fetches the majority's state."""
    [(majority, count)] = Counter(votes.values()).most_common(1)
    # Without a majority nobody knows who is right: the step is begun again, until `most_attempts` halts the job.
    again = not (member.generation and member.generation.attempt and 2 * count > len(votes))
    minority = () if again else (seat for seat, result in votes.items() if result != majority)
    member.change = replace(member.change, again=again, suspects=member.change.suspects.union(minority))
    return propose_change(member)


def vote_again(member: MemberState) -> Instructions:
    """Repeat what may have been lost; suspect a member that keeps those with a private copy waiting for too long."""
    # Joiners fetch the state during a generation's first step, and the others wait for that here.
    fetching = member.generation is not None and member.generation.joining and member.step == member.entered_at
    patience_s = member.settings.fetch_patience_s if fetching else member.settings.patience_s
    _suspect_late(member, patience_s, 2 * patience_s)
    return [*propose_change(member), *_publish_ack(member)]


def _late(member: MemberState) -> tuple[MemberId, ...]:
    """Return the members that have not acknowledged the attempt at hand."""
    acks = member.acks
    return tuple(seat for seat in member.members if seat not in acks or acks[seat].tag != member.tag)


def _suspect_late(member: MemberState, patience_s: float, leader_s: float) -> None:
    """Suspect whom the others have waited for too long: the leader those who are late, the others the leader.

    Args:
        member: Who waits.
        patience_s: How long the leader waits for acknowledgements, seconds.
        leader_s: How long the others wait for what the leader does then, seconds.
    """
    waited = member.now - member.since
    if member.is_leader and waited > patience_s:
        member.suspect(*_late(member))
    elif not member.is_leader and waited > leader_s:
        member.suspect(*member.members[:1])  # the leader had its turn to suspect others, and has not decided


def _commit_of(member: MemberState, tag: Tag, digest: str) -> Commit:
    first, samples = member.settings.samples(tag.step)
    return Commit(member.members, first, samples, samples if member.settings.mean else 1, digest)


# -------------------------------------------------------------------------------------------------
# A decision stands: COMMIT is applied, ABORT leads on to the next generation.


def decision_read(member: MemberState, event: e.DecisionRead) -> Instructions:
    """The decision register was read, for whatever reason: what stands there counts (rule 3)."""
    member.unanswered = None
    if event.decision is None or event.tag != member.tag:
        return []
    if isinstance(event.decision, Commit):
        return _apply_commit(member, event.decision)
    if member.phase is MemberPhase.RESOLVING:
        # ABORT is won: nothing is open in the old generation, the copy is of no use any more.
        member.own = None
        return [i.Discard(event.tag), *_enter_generation(member)]
    return [i.ReadGeneration()]  # a later generation stands, or there would be no ABORT


def _apply_commit(member: MemberState, decision: Commit) -> Instructions:
    """Apply the private copy; then begin the next step, or abort it where a later generation stands."""
    tag, own = member.tag, member.own
    assert tag is not None
    assert member.step is not None
    # A process that reads COMMIT holds that very result, or is no member any more (rule 1).
    if own is None or own.tag != tag or own.digest != decision.digest:
        return member.end(i.Leave(f"{tag} is committed, and {member.seat} has another result"))
    member.step, member.own = member.step + 1, None
    every = member.settings.checkpoint_every
    saved = [i.Checkpoint(member.step)] if every and member.step % every == 0 else []
    applied: Instructions = [i.Apply(tag, decision), *saved]
    if member.phase is MemberPhase.RESOLVING:
        return [*applied, *_abort_step(member)]  # of the next step, in the same old generation
    return [*applied, *_begin_step(member, between_steps=True)]


# -------------------------------------------------------------------------------------------------
# Who takes part: what a member would change, and when it proposes that.


def propose_change(member: MemberState, between_steps: bool = False) -> Instructions:
    """Propose the next generation, if a change of the membership is due and not proposed yet.

    Args:
        member: Who proposes.
        between_steps: A step was just applied: the leader makes the changes that could wait until then, too.
    """
    base, change, settings = member.newest, member.change, member.settings
    if base is None or member.phase is MemberPhase.FENCING or not member.is_among(base.members):
        return []

    # Is one due? A dead member or a broken link at once, by whoever notices; newcomers, drains and quotas between
    # steps, by the leader; an early end while no private copy is held, whose step might be committed still.
    patient = between_steps and member.is_own(base.leader) and change.patient(base)
    ends = change.ends and base.last is None and member.is_settled and member.own is None
    if not change.urgent(base) and not patient and not ends:
        return []

    # May it be? With too few members, or after too many attempts at one step, the job halts.
    proposal = successor(base, change, member.step, member.is_settled)
    most_attempts = settings.most_attempts
    if member.has_last:
        most_attempts *= max(settings.ranks, 1)  # at the end every rank may come and go: nothing fails by that
    if len(proposal.members) < settings.least_members:
        left, needed = len(proposal.members), settings.least_members
        return member.end(i.Halt(f"{left} ranks are left and {needed} are needed: start the job again, it resumes"))
    if proposal.attempt >= most_attempts:
        return member.end(
            i.Halt(
                f"step {proposal.step} was begun {most_attempts} times in vain: see the log for exchanges that fail "
                "each time; if there are none, ranks compute different results"
            )
        )

    # Compare-and-set decides between proposals of several members; the same one is repeated only by a tick.
    if proposal == member.proposal:
        return []
    member.proposal = proposal
    return [i.ProposeGeneration(base, proposal)]


def peer_suspected(member: MemberState, event: e.PeerSuspected) -> Instructions:
    """A process is dead or silent."""
    member.suspect(event.seat)
    return propose_change(member)


def attempt_failed(member: MemberState, event: e.AttemptFailed) -> Instructions:
    """The exchange cannot be finished: try again without the suspects, around the links, or with the same members."""
    if event.tag != member.tag or member.phase is not MemberPhase.EXCHANGING:
        return []
    member.suspect(*event.suspects)
    broken = member.change.broken | set(event.broken)
    member.change = replace(member.change, broken=broken, again=not event.suspects and not event.broken)
    return propose_change(member)


def drain_wanted(member: MemberState, event: e.DrainWanted) -> Instructions:
    """A rank is to wait until the end, once the step is done."""
    member.change = replace(member.change, drains=member.change.drains | {event.rank})
    return []


def quotas_wanted(member: MemberState, event: e.QuotasWanted) -> Instructions:
    """Micro-batches are to be shared out otherwise, once the step is done."""
    member.change = replace(member.change, quotas=event.quotas)
    return []


# -------------------------------------------------------------------------------------------------
# A process joins: it asks, is offered state, and fetches it; and what members do about it.


def ask_to_join(member: MemberState) -> Instructions:
    """Ask; a member without state asks for an offer by the same message. A rank that was drained waits for the end."""
    drained = member.newest is not None and member.seat.rank in member.newest.drained
    return [*propose_change(member), *([] if drained else [i.AskToJoin(member.seat)])]


def fetch_again(member: MemberState) -> Instructions:
    """Ask for another offer; where nobody brought state and nobody has offered any, give the incarnation up."""
    nobody = member.generation is not None and not member.generation.holders and member.offer is None
    if nobody and member.now - member.since > member.settings.patience_s:
        return _give_up_incarnation(member)
    return ask_to_join(member)


def join_requested(member: MemberState, event: e.JoinRequested) -> Instructions:
    """A process asks: to be a member, or as a member for state."""
    base = member.newest
    if base is not None and event.seat in base.members:
        return _offer_state(member)
    # It is alive, whatever was thought of it; older epochs of its rank are dead (`MembershipChange.lost`).
    suspects = member.change.suspects - {event.seat}
    member.change = replace(member.change, newcomers=member.change.newcomers | {event.seat}, suspects=suspects)
    return propose_change(member)


def _offer_state(member: MemberState) -> Instructions:
    """Offer the state to those who join, as long as it is the one that the generation began with (rule 4)."""
    record, tag = member.generation, member.tag
    if record is None or tag is None or member.step != member.entered_at or member.phase is MemberPhase.RESOLVING:
        return []
    joining = tuple(rank for rank in record.joining if rank != member.seat.rank)
    return [i.OfferState(tag, joining)] if joining else []


def state_offered(member: MemberState, event: e.StateOffered) -> Instructions:
    """Take the first offer up that is good in this generation."""
    offer, record = event.offer, member.generation
    if member.phase is not MemberPhase.FETCHING or record is None or member.offer is not None:
        return []
    if offer.tag != record.tag(offer.tag.step) or offer.seat not in record.members:
        return []
    member.offer = offer
    return [i.FetchState(offer.seat, offer.tag, offer.digest)]


def state_fetched(member: MemberState, event: e.StateFetched) -> Instructions:
    """The state is here: take part, if it is what was offered."""
    if member.phase is not MemberPhase.FETCHING or member.offer is None or event.tag != member.offer.tag:
        return []
    if event.digest != member.offer.digest:
        return fetch_failed(member, e.FetchFailed(event.tag))
    member.step = member.entered_at = event.tag.step
    return _begin_step(member)


def fetch_failed(member: MemberState, event: e.FetchFailed) -> Instructions:
    """Drop the offer: the next tick asks for another."""
    if member.offer is not None and event.tag == member.offer.tag:
        member.offer = None
    return []


# -------------------------------------------------------------------------------------------------
# How the job ends: with every rank after the last step, or without a store.
#
# The end is decided as a step is. A member that has applied the last one keeps its state where it outlives the process,
# and acknowledges that with the state's digest. The leader lets in whoever is still to come (who died near the end, or
# was drained), and once every rank has acknowledged the same digest it writes into the generation register that the job
# is over. Only then does any rank go on to what its script does after the loop; a process that is started after that
# finds the state where its rank has kept it.


def state_kept(member: MemberState, event: e.StateKept) -> Instructions:
    """The final state is kept: acknowledge it."""
    if event.tag != member.tag or member.phase is not MemberPhase.KEEPING:
        return []
    member.enter_phase(MemberPhase.CLOSING)
    member.own = e.Acknowledgement(event.tag, member.seat, event.digest)
    member.acks = {**member.acks, member.seat: member.own}
    return _publish_ack(member)


def ranks_gone(member: MemberState, event: e.RanksGone) -> Instructions:
    """Some ranks do not come any more."""
    member.gone = frozenset(event.ranks)
    return _end_job_if_all_kept(member)


def _end_job_if_all_kept(member: MemberState) -> Instructions:
    """End the job, once the leader knows that every rank has kept the same state; only then is it over."""
    record, own, settings = member.generation, member.own, member.settings
    if member.phase is not MemberPhase.CLOSING or not member.is_leader or not member.is_settled or own is None:
        return []
    assert record is not None
    if _late(member):
        return []
    # Ranks that are no members are awaited too, unless they are known to come no more.
    patient = member.now - member.since <= settings.end_patience_s
    if patient and not set(member.absent_ranks) <= member.gone:
        return []
    votes = {seat: ack.digest for seat, ack in member.acks.items() if ack.tag == own.tag}
    if len(set(votes.values())) > 1:
        return _outvote(member, votes)
    return [i.ProposeGeneration(record, ending(record, own.tag.step, own.digest, member.absent_ranks))]


def wait_for_all(member: MemberState) -> Instructions:
    """Repeat what may have been lost; let newcomers in, and suspect who does not acknowledge for too long."""
    patience_s = member.settings.fetch_patience_s
    _suspect_late(member, patience_s, 2 * patience_s + member.settings.end_patience_s)
    return [*propose_change(member, between_steps=True), *_publish_ack(member)]


def end_wanted(member: MemberState, _: e.EndWanted) -> Instructions:
    """This rank wants no further step; if it is at the end already, nothing is to be done."""
    if member.phase in (MemberPhase.KEEPING, MemberPhase.CLOSING):
        return []
    member.change = replace(member.change, ends=True)
    return propose_change(member)


def store_lost(member: MemberState, _: e.StoreLost) -> Instructions:
    """The registers cannot be reached any more: end; after the last step nothing is lost by that."""
    if member.phase in (MemberPhase.KEEPING, MemberPhase.CLOSING):
        return member.end(i.Finish("", member.absent_ranks))
    patience = member.settings.store_patience_s
    return member.end(i.Halt(f"the store has not answered for {patience:g} s: start the job again, it resumes"))


# -------------------------------------------------------------------------------------------------
# An incarnation is given up: ABORT is won wherever one of its generations could still commit a step.
#
# All who held state are gone, or seem to be. A stopped one may wake up, find all acknowledgements there, and commit;
# and all of them may wake up and go on. So before the job resumes from a checkpoint the generation register is closed
# (no later generation will be), and every generation that may still be alive is ended: its decisions share a register,
# in which an ABORT behind what is committed lets nothing follow. Then the next incarnation begins.


def nobody_left(member: MemberState, _: e.NobodyLeft) -> Instructions:
    """A member with state goes on; others give the incarnation up."""
    return _give_up_incarnation(member) if member.step is None else []


def _give_up_incarnation(member: MemberState) -> Instructions:
    if member.newest is None:
        return []
    member.enter_phase(MemberPhase.FENCING)
    return close_incarnation(member)


def close_incarnation(member: MemberState) -> Instructions:
    """Propose the record that closes the incarnation, so that no generation follows; once it stands, go on fencing."""
    record = member.newest
    if record is None or member.fence is not None:
        return _end_next_generation(member)
    return [i.ProposeGeneration(record, closing(record))]


def generation_ended(member: MemberState, event: e.GenerationEnded) -> Instructions:
    """Nothing can be committed in a generation any more."""
    member.unanswered = None
    if member.fence is None or event.number not in member.fence:
        return []
    member.fence = tuple(number for number in member.fence if number != event.number)
    return _end_next_generation(member)


def _end_next_generation(member: MemberState) -> Instructions:
    """Fence off the next generation of the closed incarnation; behind the last one open the next incarnation."""
    closed = member.newest  # no generation follows the one that closes an incarnation
    if member.fence is None or closed is None:
        return []
    if not member.fence:
        return member.end(i.OpenIncarnation(member.incarnation + 1))
    return [i.EndGeneration(member.incarnation, member.fence[0], closed.number)]
