"""A step from its beginning to its exchange."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol.decision import Commit, MemberId, Tag
from ringside.survive.protocol.generation import Fence, Generation, closing, ending, successor
from ringside.survive.protocol.state import Instructions, MemberPhase, MemberState

__all__ = [
    "abort",
    "ack_seen",
    "ask_to_join",
    "attempt_failed",
    "build_fence",
    "checkpoint",
    "close",
    "close_again",
    "committed",
    "consider",
    "decision_read",
    "differ",
    "drain_wanted",
    "end_wanted",
    "enter",
    "fence_on",
    "fetch_again",
    "fetch_failed",
    "generation_read",
    "give_up",
    "join_requested",
    "keep",
    "newer_heard_of",
    "next_step",
    "nobody_left",
    "offer_state",
    "over",
    "peer_suspected",
    "quotas_wanted",
    "ranks_gone",
    "result_ready",
    "started",
    "state_fetched",
    "state_kept",
    "state_offered",
    "store_is_gone",
    "store_lost",
    "vote_again",
    "wait_on",
    "work_done",
]


# -------------------------------------------------------------------------------------------------
# Who takes part: what a member would change, and when it proposes that.


def consider(member: MemberState, between_steps: bool = False) -> Instructions:
    """Propose another membership, if one is needed and not under way.

    Args:
        member: Who considers.
        between_steps: A step is just done: what can wait until then is changed too, by the leader.
    """
    base = member.newest
    if base is None or member.phase is MemberPhase.FENCING or not member.is_among(base.members):
        return []
    patient = between_steps and member.is_own(base.leader) and member.wishes.patient(base)
    ends = member.wishes.ends and base.last is None and member.is_settled and member.own is None
    if not member.wishes.urgent(base) and not patient and not ends:
        return []
    wanted = successor(base, member.wishes, member.step, member.is_settled, member.settings.quotas)
    trouble = _trouble(member, wanted)
    if trouble:
        return member.end(i.Halt(trouble))
    if wanted == member.proposal:
        return []
    member.proposal = wanted
    return [i.ProposeGeneration(base, wanted)]


def _trouble(member: MemberState, wanted: Generation) -> str:
    """Return why a generation must not be; "": it may."""
    least, most = member.settings.least_members, member.settings.most_attempts
    if member.has_last:
        most *= max(member.settings.ranks, 1)  # every rank may come and go: nothing fails by that
    if len(wanted.members) < least:
        return f"{len(wanted.members)} ranks are left and {least} are needed: start the job again, it resumes"
    if wanted.attempt >= most:
        return (
            f"step {wanted.step} was begun {most} times in vain: see the log for exchanges that fail each time; "
            "if there are none, ranks compute different results"
        )
    return ""


def peer_suspected(member: MemberState, event: e.PeerSuspected) -> Instructions:
    """A process is dead or silent."""
    member.suspect(event.seat)
    return consider(member)


def attempt_failed(member: MemberState, event: e.AttemptFailed) -> Instructions:
    """The exchange cannot be finished: without whom, or around which links, it is to be tried again."""
    if event.tag != member.tag or member.phase is not MemberPhase.EXCHANGING:
        return []
    member.suspect(*event.suspects)
    broken = member.wishes.broken | set(event.broken)
    member.wishes = replace(member.wishes, broken=broken, again=not event.suspects and not event.broken)
    return consider(member)


def drain_wanted(member: MemberState, event: e.DrainWanted) -> Instructions:
    """A rank is to wait until the end, once the step is done."""
    member.wishes = replace(member.wishes, drains=member.wishes.drains | {event.rank})
    return []


def quotas_wanted(member: MemberState, event: e.QuotasWanted) -> Instructions:
    """Micro-batches are to be shared out otherwise, once the step is done."""
    member.wishes = replace(member.wishes, quotas=event.quotas)
    return []


# -------------------------------------------------------------------------------------------------
# How a member comes to an end: with every rank after the last step, without a store, or by giving an incarnation up.
#
# The end is decided as a step is. Who has applied the last one keeps its state where it outlives the process, and
# acknowledges that with the state's digest. The leader lets in whoever is still to come (who died near the end, or was
# drained), and once every rank has acknowledged the same digest it writes into the generation register that the job is
# over. Only then does any rank go on to what its script does after the loop; a process that is started after that finds
# the state where its rank has kept it.


def store_lost(member: MemberState, _: e.StoreLost) -> Instructions:
    """The registers cannot be reached any more."""
    return store_is_gone(member)


def store_is_gone(member: MemberState) -> Instructions:
    """End because the registers do not answer; after the last step nothing is lost by that."""
    if member.phase in (MemberPhase.KEEPING, MemberPhase.CLOSING):
        return member.end(i.Finish("", _without(member)))
    patience = member.settings.store_patience_s
    return member.end(i.Halt(f"the store has not answered for {patience:g} s: start the job again, it resumes"))


def keep(member: MemberState) -> Instructions:
    """Keep the final state; whoever was drained shall come for it."""
    tag, record = member.tag, member.generation
    assert tag is not None
    assert record is not None
    member.enter_phase(MemberPhase.KEEPING)
    member.wishes = replace(member.wishes, drains=frozenset(), quotas=(), ends=bool(record.drained))
    return [*consider(member), i.KeepState(tag)]


def state_kept(member: MemberState, event: e.StateKept) -> Instructions:
    """The final state is kept: acknowledge it."""
    if event.tag != member.tag or member.phase is not MemberPhase.KEEPING:
        return []
    member.enter_phase(MemberPhase.CLOSING)
    member.own = e.Acknowledgement(event.tag, member.seat, event.digest)
    member.acks = {**member.acks, member.seat: member.own}
    return _tell(member)


def ranks_gone(member: MemberState, event: e.RanksGone) -> Instructions:
    """Some ranks do not come any more."""
    member.gone = frozenset(event.ranks)
    return close(member)


def end_wanted(member: MemberState, _: e.EndWanted) -> Instructions:
    """This rank wants no further step; if it is at the end already, nothing is to be done."""
    if member.phase in (MemberPhase.KEEPING, MemberPhase.CLOSING):
        return []
    member.wishes = replace(member.wishes, ends=True)
    return consider(member)


def wait_on(member: MemberState) -> Instructions:
    """Repeat what may have been lost; let in who has come, and suspect who does not acknowledge for too long."""
    waited, settings = member.now - member.since, member.settings
    patience_s = settings.fetch_patience_s
    if member.is_leader and waited > patience_s:
        member.suspect(*(seat for seat in member.members if not _has_kept(member, seat)))
    elif not member.is_leader and waited > 2 * patience_s + settings.end_patience_s:
        member.suspect(*member.members[:1])
    return [*consider(member, between_steps=True), *_tell(member)]


def _tell(member: MemberState) -> Instructions:
    """Tell the leader that the final state is kept; the leader counts instead."""
    if member.own is None or member.generation is None:
        return []
    return close(member) if member.is_leader else [i.PublishAck(member.own, member.generation.leader)]


def close(member: MemberState) -> Instructions:
    """End the job, once the leader knows that every rank has kept the same state; only then is it over."""
    record, own = member.generation, member.own
    if member.phase is not MemberPhase.CLOSING or not member.is_leader or not member.is_settled or own is None:
        return []
    assert record is not None
    if not all(_has_kept(member, seat) for seat in record.members) or _awaits(member):
        return []
    said = {seat: ack.digest for seat, ack in member.acks.items() if ack.tag == own.tag}
    if member.settings.rules.equal_digests and len(set(said.values())) > 1:
        return differ(member, said)
    return [i.ProposeGeneration(record, ending(record, own.tag.step, own.digest, member.settings.ranks))]


def differ(member: MemberState, said: dict[MemberId, str] | dict[MemberId, tuple[str, str]]) -> Instructions:
    """Try once more; the second time whoever is not with the majority goes, and comes back with its state."""
    [(usual, votes)] = Counter(said.values()).most_common(1)
    again = not (member.generation and member.generation.attempt and 2 * votes > len(said))
    others = () if again else (seat for seat, result in said.items() if result != usual)
    member.wishes = replace(member.wishes, again=again, suspects=member.wishes.suspects.union(others))
    return consider(member)


def _has_kept(member: MemberState, seat: MemberId) -> bool:
    ack = member.acks.get(seat)
    return ack is not None and ack.tag == member.tag


def _awaits(member: MemberState) -> bool:
    """Tell whether a rank is still to come."""
    patient = member.now - member.since <= member.settings.end_patience_s
    return member.settings.rules.all_come and patient and not set(_without(member)) <= member.gone


def _without(member: MemberState) -> tuple[int, ...]:
    """Return the ranks that are not here."""
    here = () if member.generation is None else member.generation.ranks
    return tuple(rank for rank in range(member.settings.ranks) if rank not in here)


def over(member: MemberState, record: Generation) -> Instructions:
    """The job is over."""
    return member.end(i.Finish(record.final, record.without))


def nobody_left(member: MemberState, _: e.NobodyLeft) -> Instructions:
    """Whoever has state goes on; others give the incarnation up."""
    return give_up(member) if member.step is None else []


def give_up(member: MemberState) -> Instructions:
    """Close the incarnation, so that no generation follows; what may still be committed is fenced off then."""
    if member.newest is None:
        return []
    member.enter_phase(MemberPhase.FENCING)
    return close_again(member)


def close_again(member: MemberState) -> Instructions:
    """Propose once more that the incarnation be closed; where it is, go on fencing."""
    record = member.newest
    if record is None or member.fence is not None:
        return _fence_again(member)
    return [i.ProposeGeneration(record, closing(record, settled=False))]


def build_fence(member: MemberState, closed: Generation) -> Instructions:
    """Begin to fence off what the closed incarnation could still commit."""
    member.phase, member.fence = MemberPhase.FENCING, Fence.around(closed)
    return _fence_again(member)


def fence_on(member: MemberState, event: e.GenerationEnded) -> Instructions:
    """Nothing is decided in a generation any more."""
    member.unanswered = None
    if member.fence is None or event.number not in member.fence.left:
        return []
    member.fence = member.fence.after(event.number)
    return _fence_again(member)


def _fence_again(member: MemberState) -> Instructions:
    if member.fence is None:
        return []
    if member.fence.done or not member.settings.rules.fence:
        return member.end(i.OpenIncarnation(member.incarnation + 1))
    return [i.EndGeneration(member.incarnation, member.fence.left[0], member.fence.closed.number)]


def next_step(member: MemberState, between_steps: bool = False) -> Instructions:
    """Begin the step, or end the job; after a step the leader changes what can wait until then.

    Not when a generation begins: whoever comes and goes again and again would keep the others from every step.
    """
    if member.has_last:
        return keep(member)
    tag, record = member.tag, member.generation
    assert tag is not None
    assert record is not None
    member.enter_phase(MemberPhase.WORKING)
    mine = record.micro_batches_of(member.seat.rank)
    return [*consider(member, between_steps), i.Compute(tag, mine, member.step == member.entered_at)]


def work_done(member: MemberState, event: e.WorkDone) -> Instructions:
    """Own micro-batches are computed: all-reduce."""
    if event.tag != member.tag or member.phase is not MemberPhase.WORKING or member.generation is None:
        return []
    member.enter_phase(MemberPhase.EXCHANGING)
    return [i.RunExchange(event.tag, member.generation)]


# -------------------------------------------------------------------------------------------------
# A process joins: it asks, is offered state, and fetches it; and what members do about it.


def ask_to_join(member: MemberState) -> Instructions:
    """Ask; a member without state asks for an offer by the same message. Whoever was drained waits for the end."""
    drained = member.newest is not None and member.seat.rank in member.newest.drained
    return [*consider(member), *([] if drained else [i.AskToJoin(member.seat)])]


def fetch_again(member: MemberState) -> Instructions:
    """Ask for another offer; where nobody brought state and nobody has offered any, there is none."""
    nobody = member.generation is not None and not member.generation.holders and member.offer is None
    if nobody and member.now - member.since > member.settings.patience_s:
        return give_up(member)
    return ask_to_join(member)


def join_requested(member: MemberState, event: e.JoinRequested) -> Instructions:
    """Somebody asks: to be a member, or as a member for state."""
    base = member.newest
    if base is not None and event.seat in base.members:
        return offer_state(member)
    lives = member.wishes.suspects - {event.seat}
    member.wishes = replace(member.wishes, newcomers=member.wishes.newcomers | {event.seat}, suspects=lives)
    return consider(member)


def offer_state(member: MemberState) -> Instructions:
    """Offer the state to those who join, as long as it is the one that the generation began with."""
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
    if event.digest != member.offer.digest and member.settings.rules.verify_state:
        return fetch_failed(member, e.FetchFailed(event.tag))
    member.step = member.entered_at = event.tag.step
    return next_step(member)


def fetch_failed(member: MemberState, event: e.FetchFailed) -> Instructions:
    """Let go of the offer: the next tick asks for another."""
    if member.offer is not None and event.tag == member.offer.tag:
        member.offer = None
    return []


# -------------------------------------------------------------------------------------------------
# Generations follow each other: founding the first one, and going from one into a later one.


def started(member: MemberState, event: e.Started) -> Instructions:
    """The process is up."""
    member.now, member.step, member.founders = event.now, event.step, event.founders
    return [i.ReadGeneration()]


def newer_heard_of(member: MemberState, _: e.NewerHeardOf) -> Instructions:
    """A message named a later generation."""
    return [i.ReadGeneration()]


def generation_read(member: MemberState, event: e.GenerationRead) -> Instructions:
    """Something stands in the generation register, or nothing."""
    member.unanswered = None
    record = event.generation
    if record is None:
        return _found(member)
    if member.newest is not None and record.number <= member.newest.number:
        return []
    member.newest, member.proposal, member.wishes = record, None, member.wishes.left_after(record)
    return _superseded(member)


def _found(member: MemberState) -> Instructions:
    """Nothing stands in the generation register: make the first one, if this process may."""
    if member.step is None or member.seat not in member.founders:
        return []
    ranks = tuple(seat.rank for seat in member.founders)
    quotas = member.settings.quotas(ranks, member.settings.micro_batches)
    owners = tuple(rank for rank, quota in zip(ranks, quotas, strict=True) for _ in range(quota))
    return [i.ProposeGeneration(None, Generation(member.incarnation, 1, member.step, 0, member.founders, owners))]


def _superseded(member: MemberState) -> Instructions:
    """A later generation stands: what is open in the own one is settled first."""
    if member.newest is not None and member.newest.over and member.phase in (MemberPhase.KEEPING, MemberPhase.CLOSING):
        return over(member, member.newest)
    if member.phase is MemberPhase.RESOLVING:
        return []  # first the old one
    if member.generation is None or member.step is None or not member.settings.rules.abort_first:
        return enter(member)
    member.enter_phase(MemberPhase.RESOLVING)
    if not member.settings.rules.keep_copy:
        member.own = None
    return abort(member)


def abort(member: MemberState) -> Instructions:
    """Try to win ABORT for the step at hand in the generation in force."""
    tag, record = member.tag, member.newest
    return [] if tag is None or record is None else [i.TryAbort(tag, record.number)]


def enter(member: MemberState) -> Instructions:
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
        return [*settled, *consider(member)]
    member.phase, member.entered_at = MemberPhase.WORKING, member.step
    return [*settled, *offer_state(member), *next_step(member)]


def _stay_outside(member: MemberState, record: Generation) -> Instructions:
    if record.over:
        return over(member, record)
    if member.generation is not None and member.seat.rank in record.drained:
        return member.end(i.Leave("this rank was drained, for it held the others up: it waits until the job ends"))
    if record.closed and member.step is None:
        return build_fence(member, record)
    if member.generation is not None or member.seat in record.left:
        return member.end(i.Leave(f"generation {record.number} goes on without {member.seat}"))
    member.phase, member.step = MemberPhase.OUTSIDE, None  # whoever would have founded the job joins like anybody
    return ask_to_join(member)


# -------------------------------------------------------------------------------------------------
# A decision stands: COMMIT is applied, ABORT leads on to the next generation.


def decision_read(member: MemberState, event: e.DecisionRead) -> Instructions:
    """Something stands in a decision register, or nothing."""
    member.unanswered = None
    if event.decision is None or event.tag != member.tag:
        return []
    taken = member.settings.rules.take_commit or member.phase is not MemberPhase.RESOLVING
    if isinstance(event.decision, Commit) and taken:
        return committed(member, event.decision)
    if member.phase is MemberPhase.RESOLVING:
        member.own = None
        return [i.Discard(event.tag), *enter(member)]
    return [i.ReadGeneration()]  # a later generation stands, or there would be no ABORT


def committed(member: MemberState, decision: Commit) -> Instructions:
    """Apply the private copy, and go on: with the next step, or to what stands of it in the old generation."""
    tag, own, rules = member.tag, member.own, member.settings.rules
    assert tag is not None
    assert member.step is not None
    if own is None or own.tag != tag or (rules.equal_digests and own.digest != decision.digest):
        return member.end(i.Leave(f"{tag} is committed, and {member.seat} holds another result"))
    member.step, member.own = member.step + 1, None
    saved = checkpoint(member, member.step) if rules.committed_only else []
    applied: Instructions = [i.Apply(tag, decision), *saved]
    if member.phase is MemberPhase.RESOLVING:
        return [*applied, *abort(member)]
    return [*applied, *next_step(member, between_steps=True)]


def checkpoint(member: MemberState, step: int) -> Instructions:
    """Have the state saved, if it is time for it."""
    every = member.settings.checkpoint_every
    return [i.Checkpoint(step)] if every and step % every == 0 else []


# -------------------------------------------------------------------------------------------------
# A result is here: members acknowledge their private copies, and the leader counts.


def result_ready(member: MemberState, event: e.ResultReady) -> Instructions:
    """The private copy is made: acknowledge it."""
    if event.tag != member.tag or member.phase is not MemberPhase.EXCHANGING:
        return []
    member.enter_phase(MemberPhase.VOTING)
    member.own = e.Acknowledgement(event.tag, member.seat, event.digest, event.state)
    member.acks = {**member.acks, member.seat: member.own}
    early = [] if member.settings.rules.committed_only else checkpoint(member, event.tag.step + 1)
    if not member.settings.rules.read_first:
        return committed(member, _commit(member, event.tag, event.digest))
    return [*early, *_publish(member)]


def vote_again(member: MemberState) -> Instructions:
    """Repeat what may have been lost; suspect whoever keeps a member with a private copy waiting too long."""
    waited, patience = member.now - member.since, _patience_s(member)
    if member.is_leader and waited > patience:
        member.suspect(*(seat for seat in member.members if not _acknowledged(member, seat)))
    elif not member.is_leader and waited > 2 * patience:
        member.suspect(*member.members[:1])
    return [*consider(member), *_publish(member)]


def _patience_s(member: MemberState) -> float:
    fetching = member.generation is not None and member.generation.joining and member.step == member.entered_at
    return member.settings.fetch_patience_s if fetching else member.settings.patience_s


def _publish(member: MemberState) -> Instructions:
    """Tell the leader of the private copy, and look for the decision; the leader counts instead."""
    if member.own is None or member.generation is None:
        return []
    if member.is_leader:
        return _count(member)
    return [i.PublishAck(member.own, member.generation.leader), i.ReadDecision(member.own.tag)]


def ack_seen(member: MemberState, event: e.AckSeen) -> Instructions:
    """Somebody holds a private copy."""
    ack, newest = event.ack, member.newest
    known = member.acks.get(ack.seat)
    if newest is None or ack.tag.incarnation != member.incarnation or (known and known.tag >= ack.tag):
        return []
    if ack.seat not in (*member.members, *newest.members):
        return []
    member.acks = {**member.acks, ack.seat: ack}
    newer = ack.tag.generation > newest.number
    return [*([i.ReadGeneration()] if newer else []), *_count(member), *close(member)]


def _count(member: MemberState) -> Instructions:
    """COMMIT, once the leader knows that every member holds the same private copy."""
    tag, rules = member.tag, member.settings.rules
    if member.phase is not MemberPhase.VOTING or not member.is_leader or tag is None or member.own is None:
        return []
    if rules.every_ack and not all(_acknowledged(member, seat) for seat in member.members):
        return []
    said = {seat: (ack.digest, ack.state) for seat, ack in member.acks.items() if ack.tag == tag}
    if rules.equal_digests and len(set(said.values())) > 1:
        return differ(member, said)
    return [i.TryCommit(tag, _commit(member, tag, member.own.digest))]


def _acknowledged(member: MemberState, seat: MemberId) -> bool:
    ack = member.acks.get(seat)
    return ack is not None and (ack.tag == member.tag or not member.settings.rules.tagged_acks)


def _commit(member: MemberState, tag: Tag, digest: str) -> Commit:
    first, samples = member.settings.samples(tag.step)
    return Commit(member.members, first, samples, samples if member.settings.mean else 1, digest)
