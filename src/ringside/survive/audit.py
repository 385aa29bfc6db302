"""Reading a job's decisions afterwards: what was committed, by whom, and whether every step was, once."""

from __future__ import annotations

from ringside.errors import MismatchError
from ringside.survive.cluster.registers import Registers
from ringside.survive.protocol.decision import Commit, Decided, Tag, decisions_key, decode_decided
from ringside.survive.protocol.generation import decode_generation, generation_key
from ringside.survive.protocol.settings import ProtocolSettings

_DIGEST = 8


class SampleDigests:
    """Digests of the results that one process has applied: registers hold them of the newest of each generation only.

    Eight bytes a step.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[int, bytearray]] = {}

    def add(self, tag: Tag, digest: str) -> None:
        """Note the digest of a step, the one after the last that was noted of its generation."""
        _, digests = self._known.setdefault((tag.incarnation, tag.generation), (tag.step, bytearray()))
        digests += bytes.fromhex(digest)

    def of(self, tag: Tag) -> str:
        """Return the digest of a step; "": it was not applied here."""
        first, digests = self._known.get((tag.incarnation, tag.generation), (0, bytearray()))
        at = _DIGEST * (tag.step - first)
        return digests[at : at + _DIGEST].hex() if at >= 0 else ""


def committed(
    registers: Registers, steps: int, settings: ProtocolSettings, digests: SampleDigests | None = None
) -> list[tuple[Tag, Commit]]:
    """Return the COMMITs that count for the steps before `steps`, by step.

    What an incarnation did after the checkpoint that the next one began with was done again: the last COMMIT counts.
    Of each generation only the newest is kept as it was written; those before it are the same but for their samples,
    which a step's number tells, and have the digest that this process knows of them, if it does.

    Args:
        registers: The job's.
        steps: How many of its steps.
        settings: Its settings.
        digests: Of the results that this process has applied.

    Raises:
        MismatchError: A generation's COMMITs took other samples than these settings give its steps, or its newest one
            had another result than was applied here.
    """
    every = every_commit(registers, steps)
    latest = {tag.step: tag.incarnation for tag, _, _ in every}
    found = []
    for tag, decided, newest in every:
        if tag.step == decided.first and settings.samples(tag.step)[0] != decided.position:
            raise MismatchError(f"{tag} began at sample {decided.position}, not at {settings.samples(tag.step)[0]}")
        if tag.step == decided.last and settings.samples(tag.step) != (newest.first, newest.samples):
            raise MismatchError(f"{tag} took {newest.samples} samples from {newest.first} on, not those of its step")
        first, samples = settings.samples(tag.step)
        own = "" if digests is None else digests.of(tag)
        if tag.step == decided.last and own not in ("", newest.digest):
            raise MismatchError(f"{tag} had the result {newest.digest}, not {own} as was applied here")
        divisor, digest = samples if settings.mean else 1, newest.digest if tag.step == decided.last else own
        if tag.incarnation == latest[tag.step]:
            found.append((tag, Commit(newest.members, first, samples, divisor, digest)))
    return sorted(found, key=lambda each: each[0].step)


def every_commit(registers: Registers, steps: int) -> list[tuple[Tag, Decided, Commit]]:
    """Return every step before `steps` that was committed, with its generation's record: by generation and step."""
    found: list[tuple[Tag, Decided, Commit]] = []
    incarnation = 1
    while (record := decode_generation(registers.read(generation_key(incarnation)))) is not None:
        for number in range(1, record.number + 1):
            decided = decode_decided(registers.read(decisions_key(incarnation, number)))
            if decided.commit is not None:
                taken = range(decided.first, min(decided.last + 1, steps))
                found += [(Tag(incarnation, number, step, 0), decided, decided.commit) for step in taken]
        incarnation += 1
    return found
