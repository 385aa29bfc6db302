"""One rank's flight-recorder dump: its bytes as plain values, and those as the calls that the rank made."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec

from ringside.decoding import UNDECODABLE, converted, plain_ranks
from ringside.errors import RingsideError

# -------------------------------------------------------------------------------------------------
# A flight-recorder dump's bytes as plain values: JSON, or a pickle of which every global is refused.
#
# A dump is untrusted input. PyTorch writes nothing but dictionaries, lists, text and numbers, so a pickle that asks for
# anything else is no dump, whatever else it may be.

SPARE_BYTES = 2 << 30
"""Memory that unpickling may claim beyond what the process has; a memo index of 2^31 would claim 32 GB."""

_ENTRIES = re.compile(r'"entries"\s*:\s*\[\s*')
_BETWEEN = re.compile(r"[\s,]*")
_decode = json.JSONDecoder().raw_decode
# Half of a UTF-16 pair, in UTF-8 or escaped: Python takes it for text that it can neither print nor encode.
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]|\\[uU][0-9a-fA-F]*[dD][89a-fA-F]")
LOST = "lost"
"""Key under which `_whole_part` describes what is lost."""

_OLD_PICKLE = re.compile(rb"\A(?:[(]?[ci][\w.]+\n[\w.]+\n|[(][dl](?:p\d|q)|[\]}](?:p\d|q)|[\]}][.]\Z)")
"""How pickles of the protocols 0 and 1 begin: a global, a dictionary or a list."""


class NotADumpError(RingsideError):
    """The bytes are no flight-recorder dump; the message names what they are instead."""


class _Refusing(pickle.Unpickler):
    """Builds dictionaries, lists, tuples, text and numbers; calls nothing."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise NotADumpError(f"refused: a pickle that asks for {module}.{name}, which no dump does; none of it was run")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise NotADumpError("refused: a pickle that refers to objects outside of itself")


def is_pickle(head: bytes) -> bool:
    """Return whether bytes begin like a pickle, of the binary protocols or of the old ones in text."""
    return (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 2) or bool(_OLD_PICKLE.match(head))


def load_dump(data: bytes) -> Any:
    """Return the plain values that a dump's bytes hold; nothing in them is ever called.

    Raises:
        NotADumpError: The bytes are broken, or ask for code.
    """
    if data[:1] in (b"{", b" ", b"\n"):
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _whole_part(data, str(error))
    try:
        with _bounded_memory(SPARE_BYTES + 64 * len(data)):
            content = _Refusing(io.BytesIO(data), encoding="utf-8", errors="replace").load()
            return _printable(content, {}) if _SURROGATE.search(data) else content
    except NotADumpError:
        raise
    except MemoryError:
        raise NotADumpError("refused: a pickle that asks for more memory than its size explains") from None
    except Exception as error:  # a hostile pickle may raise anything at all
        raise NotADumpError(f"its pickle breaks off or is damaged ({type(error).__name__}: {error})") from None


def _printable(value: Any, known: dict[int, Any]) -> Any:
    """Return plain values with "?" in place of lone surrogates; `known`: what became of the containers seen so far."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if not isinstance(value, list | tuple | dict) or id(value) in known:
        return known.get(id(value), value)
    # containers are entered before they are filled: a pickle may hold itself
    if isinstance(value, dict):
        known[id(value)] = found = {}
        found.update({_printable(key, known): _printable(item, known) for key, item in value.items()})
        return found
    several: list[Any] = []
    known[id(value)] = several
    several.extend(_printable(item, known) for item in value)
    if isinstance(value, tuple):  # later places that hold the same one get a tuple, too
        known[id(value)] = tuple(several)
    return known[id(value)]


def _whole_part(data: bytes, why: str) -> dict[str, Any]:
    """Return what is whole of a dump in JSON that breaks off: everything before its entries, and whole entries.

    Args:
        data: The bytes.
        why: What is wrong with them.

    Returns:
        The dump, with `LOST` saying what of it is lost.

    Raises:
        NotADumpError: No entry is whole.
    """
    text = data.decode("utf-8", "replace")
    begin = _ENTRIES.search(text)
    entries: list[Any] = []
    offset = begin.end() if begin else len(text)
    with contextlib.suppress(ValueError, RecursionError):
        while True:
            entry, offset = _decode(text, offset)
            entries.append(_printable(entry, {}))
            offset = _BETWEEN.match(text, offset).end()  # type: ignore[union-attr]
    if begin is None or not entries:
        raise NotADumpError(f"its JSON breaks off or is damaged ({why})")
    lost = f"its JSON breaks off after {len(entries)} whole calls; those after them, the newest, are lost"
    # What stands before the entries; nothing where that is no JSON either.
    try:
        before = msgspec.json.decode(text[: begin.start()].rstrip().rstrip(",") + "}")
    except (msgspec.DecodeError, RecursionError):
        before = {}
    return {**(before if isinstance(before, dict) else {}), "entries": entries, LOST: lost}


@contextlib.contextmanager
def _bounded_memory(spare_bytes: int) -> Iterator[None]:
    """Let this process grow by no more than so many bytes for the moment."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + spare_bytes
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# -------------------------------------------------------------------------------------------------
# One rank's flight-recorder dump as a value: which collectives it entered, which of them ended.
#
# Formats 2.0 to 2.10 of `torch/csrc/distributed/c10d/FlightRecorder*`, of NCCL and Gloo. What differs between them:
# Gloo never fills in `state` and marks what ended by `retired`; its `pg_config` is empty; older ones have `seq_id`.
# Of a backend in Python no end is known: its entries are retired from the beginning, and its status has none completed.

_NUMBER = re.compile(r"[0-9]{1,18}")
P2P = re.compile(r"(send|recv) (\d{1,9})(->|<-)(\d{1,9}(?!\d)|\?)")
NOBODY, ANYONE, UNTOLD = -1, -2, -3
"""Peers of a collective, of a receive from anyone (`recv 3<-?`), and of messages whose peer is not told."""
MOST_ITEMS = 1 << 50
MOST_PENDING = 2_000
"""Calls without an end that are kept of one rank."""

Int = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
"""Larger numbers are damage: Python neither prints them nor makes floats of them."""
Number = Int | Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]

ITEM_BYTES = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat", "UInt64"), 8),
    **dict.fromkeys(("Float", "Int", "UInt32"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short", "UInt16"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"), 1),
    "ComplexDouble": 16,
}


class StackFrame(msgspec.Struct, frozen=True):
    """One frame of a Python stack."""

    name: str = ""
    filename: str = ""
    line: int = 0


class _Entry(msgspec.Struct):
    process_group: tuple[str, ...] | str = ()
    profiling_name: str = ""
    collective_seq_id: Int | None = None
    p2p_seq_id: Int | None = None
    seq_id: Int | None = None
    pg_id: Int | None = None
    input_sizes: list[list[Int]] = []
    output_sizes: list[list[Int]] = []
    input_dtypes: list[str] = []
    output_dtypes: list[str] = []
    state: str | None = None
    retired: bool = False
    is_p2p: bool | None = None
    frames: Any = None
    time_created_ns: Number | None = None
    time_discovered_completed_ns: Number | None = None
    timeout_ms: Number | None = None


class _PgConfig(msgspec.Struct):
    desc: str = ""
    ranks: str | list[Int] = ""


class _PgStatus(msgspec.Struct):
    last_enqueued_collective: Int = -1
    last_completed_collective: Int = -1


class _Dump(msgspec.Struct):
    version: str = ""
    nccl_version: str | None = None
    comm_lib_version: str | None = None
    pg_config: dict[str, _PgConfig] = {}
    pg_status: dict[str, _PgStatus] = {}
    entries: list[Any] = []


class RecordedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One collective, send or receive that a rank entered.

    Args:
        group: Name of its process group.
        op: `all_reduce`, `send`, ... without the backend.
        backend: `nccl`, `gloo`, ...
        seq: Its number among the group's collectives (`p2p_seq_id` for sends and receives).
        peer: For sends and receives, the other side as a rank *of the group*, `ANYONE` or `UNTOLD`; otherwise `NOBODY`.
        shape: `(op, input sizes, output sizes, dtypes)` as text: what ranks must agree on.
        created_s: When it was called, seconds since 1970; 0 where unknown.
        ended_s: When it was seen to have ended; 0 where unknown or not yet.
        done: Whether it ended.
        endless: Whether that is not known: torch takes collectives of a backend in Python for ended as they are called.
        frames: The Python stack that called it, innermost first.
    """

    group: str
    op: str
    backend: str
    seq: int
    peer: int = NOBODY
    shape: tuple[str, str, str, str]
    nbytes: int = 0
    created_s: float = 0.0
    ended_s: float = 0.0
    done: bool = False
    endless: bool = False
    timeout_s: float = 0.0
    frames: list[StackFrame] = []

    @property
    def p2p(self) -> bool:
        """Whether it is a send or a receive."""
        return self.peer != NOBODY


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A process group as one rank knows it; `ranks` are global, in group order, none where it does not list them."""

    name: str
    desc: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """What to call it: its description and its number."""
        desc = self.desc.partition(",")[0] if self.desc not in ("", "undefined") else ""
        return f"{desc} (group {self.name})" if desc else f"group {self.name}"


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's recorder held.

    Args:
        rank: The global rank, from the file's name.
        written_s: When the file was last written (copying may have changed that), seconds since 1970.
        version: The dump format's.
        library: Version of NCCL, where it is recorded.
        groups: The rank's process groups by name.
        entered: Last collective entered, by group (groups with sends or receives left out).
        completed: Last collective completed, likewise.
        calls: Calls in the order in which they were made.
        skipped: Entries that could not be read.
        lost: What of the file is lost, in a line; empty where it is whole.
    """

    file: str
    rank: int
    written_s: float = 0.0
    version: str = ""
    library: str = ""
    groups: dict[str, Group] = {}
    entered: dict[str, int] = {}
    completed: dict[str, int] = {}
    calls: list[RecordedCall] = []
    skipped: int = 0
    lost: str = ""

    def by_group(self) -> dict[str, list[RecordedCall]]:
        """Return its calls by the name of their group, in order."""
        found: dict[str, list[RecordedCall]] = {}
        for call in self.calls:
            found.setdefault(call.group, []).append(call)
        return found

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks of the whole job, where the dump lists them."""
        return max((group.ranks for group in self.groups.values()), key=len, default=())


def read_dump(content: Any, file: str, rank: int, written_s: float = 0.0) -> Dump:
    """Convert a dump's plain values to a `Dump`.

    Args:
        content: What `load.load` returned.
        file: What to call the file.
        rank: The rank that wrote it.
        written_s: When the file was last written, seconds since 1970.

    Raises:
        NotADumpError: It has no `entries`, or they are no list.
    """
    if not isinstance(content, dict) or "entries" not in content:
        raise NotADumpError("is no flight-recorder dump: it has no `entries`")
    try:
        raw = msgspec.convert(content, _Dump, strict=False)
    except UNDECODABLE as error:
        raise NotADumpError(f"is no flight-recorder dump that this version can read ({error})") from None
    entries = converted(raw.entries, list[_Entry], None)
    if entries is None:  # one damaged entry spoils the list: keep those that can be read one by one
        each = (converted(item, _Entry, None) for item in raw.entries)
        entries = [entry for entry in each if entry is not None]
    # Groups as configured (Gloo's are not), and those that only entries name.
    groups = {
        name: Group(name=name, desc=config.desc, ranks=plain_ranks(config.ranks))
        for name, config in raw.pg_config.items()
        if name or config.desc
    }
    for entry in entries:
        name, desc = entry_group(entry)
        if name not in groups:
            groups[name] = Group(name=name, desc=desc)
    # Sends and receives count in the same numbers: a group that has any shows nothing of its collectives in its status.
    names = _names_of_ids(raw, entries)
    tainted = {entry_group(entry)[0] for entry in entries if _is_p2p(entry)}
    status = {names[pg_id]: state for pg_id, state in raw.pg_status.items() if pg_id in names}
    clean = {name: state for name, state in status.items() if name not in tainted}
    return Dump(
        file=file,
        rank=rank,
        written_s=written_s,
        version=raw.version,
        library=raw.nccl_version or raw.comm_lib_version or "",
        groups=groups,
        entered={name: state.last_enqueued_collective for name, state in clean.items()},
        completed={name: state.last_completed_collective for name, state in clean.items()},
        calls=_calls(entries, _endless(entries, status)),
        skipped=len(raw.entries) - len(entries),
        lost=str(content.get(LOST, "")),
    )


def entry_group(entry: _Entry) -> tuple[str, str]:
    """Name and description of an entry's group."""
    group = entry.process_group
    if isinstance(group, str):
        return group, ""
    return (group[0] if group else ""), (group[1] if len(group) > 1 else "")


def _names_of_ids(raw: _Dump, entries: list[_Entry]) -> dict[str, str]:
    """`pg_status` counts groups as this rank made them, `pg_config` as the job did: which number is which group.

    Entries carry both. Groups without entries are paired by their order (both count upwards as groups are made), if
    there are equally many and the pairs that are known agree.
    """
    known = {str(entry.pg_id): entry_group(entry)[0] for entry in entries if entry.pg_id is not None}
    names = [name for name in raw.pg_config if name]
    if len(names) != len(raw.pg_status) or not all(_NUMBER.fullmatch(text) for text in [*names, *raw.pg_status]):
        return known
    pairs = dict(zip(sorted(raw.pg_status, key=int), sorted(names, key=int), strict=True))
    return pairs if all(pairs.get(pg_id) == name for pg_id, name in known.items()) else known


def _is_p2p(entry: _Entry) -> bool:
    return bool(entry.is_p2p) if entry.is_p2p is not None else bool(P2P.search(entry.profiling_name))


def _endless(entries: list[_Entry], status: dict[str, _PgStatus]) -> set[str]:
    """Groups none of whose collectives has ever ended by their status, though entries are retired."""
    retired = {entry_group(entry)[0] for entry in entries if entry.retired}
    ended = {entry_group(entry)[0] for entry in entries if entry.state == "completed"}
    return {
        name
        for name in retired - ended
        if name in status and status[name].last_completed_collective < 0 <= status[name].last_enqueued_collective
    }


def _calls(entries: list[_Entry], endless: set[str]) -> list[RecordedCall]:
    """The calls that entries record, in order; of those without an end at most `MOST_PENDING`."""
    # The parts of a coalesced call end with it and have no state of their own.
    completed = [entry.retired or entry.state == "completed" for entry in entries]
    open_parts: dict[tuple[str, bool, int | None], list[int]] = {}
    for index, entry in enumerate(entries):
        is_p2p = _is_p2p(entry)
        key = (entry_group(entry)[0], is_p2p, entry.p2p_seq_id if is_p2p else entry.collective_seq_id)
        if entry.profiling_name.endswith("coalesced"):
            for part in open_parts.pop(key, []):
                completed[part] = completed[part] or completed[index]
        elif not completed[index]:
            open_parts.setdefault(key, []).append(index)
    # equal shapes are one object: dumps hold hundreds of thousands of calls
    shapes: dict[tuple[str, str, str, str], tuple[str, str, str, str]] = {}
    calls = []
    pending = 0
    for entry, done in zip(entries, completed, strict=True):
        # what ended is matched with the others' and needed whole; of what waits, the first calls show the cause
        pending += not done
        if not done and pending > MOST_PENDING:
            continue
        backend, _, operation = entry.profiling_name.rpartition(":")
        is_p2p = _is_p2p(entry)
        is_endless = not is_p2p and entry_group(entry)[0] in endless
        dtypes = ",".join(entry.input_dtypes or entry.output_dtypes)
        shape = (operation.partition(" ")[0], str(entry.input_sizes), str(entry.output_sizes), dtypes)
        # older formats count collectives, sends and receives in one number
        seq = entry.p2p_seq_id if is_p2p else entry.collective_seq_id
        seq = entry.seq_id if seq is None else seq
        # a stack is only read where somebody may wait, for most calls ended
        known = done and not is_endless
        frames: list[StackFrame] = [] if known else converted(entry.frames or [], list[StackFrame], [])
        calls.append(
            RecordedCall(
                group=entry_group(entry)[0],
                op=shape[0],
                backend=backend,
                seq=-1 if seq is None else seq,
                peer=_peer(operation) if is_p2p else NOBODY,
                shape=shapes.setdefault(shape, shape),
                nbytes=_nbytes(entry.input_sizes, entry.input_dtypes),
                created_s=(entry.time_created_ns or 0) / 1e9,
                ended_s=(entry.time_discovered_completed_ns or 0) / 1e9,
                done=done,
                endless=is_endless,
                timeout_s=(entry.timeout_ms or 0) / 1e3,
                frames=frames,
            )
        )
    return calls


def _peer(operation: str) -> int:
    """The other side of a message; `nccl:coalesced` is several ones', and names none."""
    match = P2P.search(operation)
    if match is None or (match[4] == "?" and match[1] != "recv"):
        return UNTOLD
    return ANYONE if match[4] == "?" else int(match[4])


def _nbytes(sizes: list[list[int]], dtypes: list[str]) -> int:
    """Bytes of all inputs; sizes that no tensor has are cut off before they overflow."""
    total = 0
    for index, dims in enumerate(sizes):
        count = 1
        for dim in dims:
            count = min(count * dim, MOST_ITEMS)
        dtype = dtypes[min(index, len(dtypes) - 1)] if dtypes else ""
        total += count * ITEM_BYTES.get(dtype, 0)
    return total
