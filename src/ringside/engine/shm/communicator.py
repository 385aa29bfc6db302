"""One rank's end of a group of ranks that share a host: all-reduce, barrier, symmetric memory, sub-groups."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np

from ringside import _core
from ringside._core.enums import Algorithm, DType, ReduceOp, Status
from ringside.engine import failures
from ringside.engine.buffers import Flat, flatten, tensor_of
from ringside.engine.collectives import Collectives
from ringside.engine.communicator import Communicator, typed_as
from ringside.engine.dtypes import ITEM_BYTES, OP_CODES, Op, dtype_code, op_name, own_weight
from ringside.engine.request import KINDS, CoreRequest, checked_op, encode_split, equal_bounds, split_members
from ringside.engine.runtime.worker import AtExit
from ringside.engine.settings import Settings, patience, timeout_seconds
from ringside.engine.shm.log import CollectiveLog
from ringside.engine.shm.memory import Storage, SymmetricMemory, share_arena
from ringside.engine.shm.program import compile_schedule
from ringside.engine.shm.rendezvous import meet
from ringside.engine.topology import cache_bytes, cpu_quota, domains, place_of, read_cpus
from ringside.errors import DeadlineError, PeerLostError, UnsupportedError, UsageError
from ringside.processes import has_ended
from ringside.schedule import ALGORITHMS, Schedule, by_name
from ringside.schedule.algorithms.hierarchical import over_groups
from ringside.text import CLOSED, did_you_mean, name_ranks

# As plain ints, which the core takes and gives, and which compare fastest.
_OK, _UNSUITED = int(Status.ok), int(Status.unsuited)
_SUM, _MAX, _BOOL = int(ReduceOp.sum), int(ReduceOp.max), int(DType.bool)
_REUNION_S = 30.0
_AUTOMATIC, _ONE_SHOT = int(Algorithm.automatic), int(Algorithm.one_shot)
_DIRECT, _PROGRAM = int(Algorithm.direct), int(Algorithm.program)
_ALL_REDUCE = KINDS.index("all_reduce")
_PRIVATE = (-1, 0, False)  # no region, nowhere in it, and nothing to map


class HostCommunicator(Collectives):
    """Collectives among the processes of one host, through memory they share.

    Every rank must call the same collectives in the same order. Use it from one thread at a time; asynchronous
    collectives run in order on a thread of its own.

    Args:
        key: Names this communicator; equal on all its ranks and on nobody else's on this host.
        rank: This rank.
        size: Number of ranks.
        settings: Tuning; must agree on all ranks.
        members: For a sub-group the ranks of the communicator it was split from, by rank here.

    Attributes:
        members: As given; of a communicator that is no sub-group its own ranks.
        domains: The ranks of each NUMA node, or else of each last-level cache, where every rank is bound to one; or ().
        inline_bytes: Largest payload that travels next to a rank's arrival flag, and so can be posted.

    Raises:
        UnsupportedError: The native core is not installed.
        DeadlineError, MismatchError: Ranks did not come, or do not fit together.
    """

    def __init__(
        self,
        key: str,
        rank: int,
        size: int,
        settings: Settings | None = None,
        *,
        members: Sequence[int] | None = None,
    ) -> None:
        self._native = _core.native()
        self.settings = settings or Settings.of_environment()
        if not 1 <= size <= self._native.MAX_RANKS:
            raise UsageError(f"{size} ranks: a communicator has 1 to {self._native.MAX_RANKS}")
        self.rank, self.size = rank, size
        self.members = tuple(range(size) if members is None else members)
        self._group = "" if members is None else f" of a sub-group (of {name_ranks(self.members)})"
        self._splits = 0
        # The members of a sub-group have just met in its parent.
        timeout_s = self.settings.timeout_s if members is None else min(self.settings.timeout_s, _REUNION_S)
        self._hub = meet(key, rank, size, self.settings.agreed(), timeout_s=timeout_s)
        # Open the core on the arena that rank 0 makes; it owns the pidfds from there on.
        try:
            settings, quota = self.settings, cpu_quota()
            fd, self._secret = share_arena(self._native, self._hub, settings.stage_bytes, settings.timeout_s)
            try:
                self._core = self._native.open_communicator(
                    arena_fd=fd,
                    stage_bytes=settings.stage_bytes,
                    rank=rank,
                    ranks=size,
                    pidfds=self._hub.pidfds,
                    patience=patience(settings, size, quota, False),
                    background=patience(settings, size, quota, True),
                    timeout_s=settings.timeout_s,
                    one_shot_bytes=settings.one_shot_bytes,
                    segment_bytes=settings.segment_bytes,
                    stream_bytes=settings.stream_bytes or cache_bytes(),
                )
                self._hub.pidfds, self._hub.lent = self._core.pidfds(), True
            finally:
                os.close(fd)
            # Ranks tell each other where they run. All have touched their own parts of the arena then: map the rest.
            cpus = read_cpus(settings.cpus or os.sched_getaffinity(0), settings.system)
            places = self._hub.exchange(place_of(cpus), timeout_s=settings.timeout_s)
            self.domains = domains([parcel.value for parcel in places])
            self._core.map_all()
        except BaseException:
            self._hub.close()
            raise
        self.memory = SymmetricMemory(self._core, self._hub, self.settings.timeout_s)
        self.log = CollectiveLog(self._core)
        self.inline_bytes: int = self._native.INLINE_BYTES
        self._programs: dict[str | Schedule, int] = {}
        self._begin()
        _at_exit.add(self)

    # -------------------------------------------------------------------------------------------- collectives

    @typed_as(Communicator.all_reduce)
    def all_reduce(
        self,
        x: Any,
        op: Op = "sum",
        async_op: bool = False,
        *,
        scale: float = 1.0,
        algorithm: str | Schedule | None = None,
        weights: float | Sequence[float] | None = None,
    ) -> Any:
        """Reduce a tensor over all ranks, in place; every rank ends with bit-identical elements.

        Contributions are folded in rank order (`direct`, `one_shot`) or in the order of the schedule named. f16 and
        bf16 are folded in f32 and rounded once.

        Args:
            x: torch CPU tensor or NumPy array of any shape, equal shape and dtype on all ranks; dtypes float32,
                float64, float16, bfloat16, int8, uint8, int16, int32, int64, bool. Symmetric memory (`empty`) is
                fastest; non-contiguous tensors are copied.
            op: sum, avg, prod, min, max, band, bor or bxor, or torch's `ReduceOp`. avg divides the sum by the number of
                ranks (integers truncate); min and max let a NaN win.
            async_op: Return a `Work` at once; the tensor is ready after its `wait()`.
            scale: Multiply each contribution first (floating dtypes with sum or avg only), as NCCL's PreMulSum does.
            algorithm: None chooses by size; `one_shot`, `direct`, the name of any schedule of
                `ringside.schedule.ALGORITHMS`, or a schedule of one's own (that `verify` has found right).
                `hierarchical` is cut into `domains`, where there are any.
            weights: With avg of a floating dtype, a weighted mean: this rank's own weight, or one weight per rank (the
                same sequence on all ranks), at least 0, such as numbers of samples. Every rank ends with
                `sum of w[r] * x[r] / sum of w[r]`, computed in the dtype that sums are folded in.

        Returns:
            `x` itself, or a `Work` whose `result()` it is.

        Raises:
            UsageError, UnsupportedError: This call cannot be; nothing was sent. On all ranks alike where their weights
                sum to 0.
            MismatchError: Ranks called different things; no tensor was changed and the communicator stays usable.
            PeerLostError, DeadlineError: The tensor's content is undefined and the communicator is broken.
        """
        code = OP_CODES.get(op, -1) if op.__class__ is str else -1
        if code < 0:
            op = op_name(op)  # torch's
            code = OP_CODES[op]
        if weights is not None:
            op = op_name(op)
            if op != "avg" or scale != 1.0:
                raise UsageError(f"weights= is for op='avg' without a scale, not for op={op!r}, scale={scale!r}")
            flat = flatten(x)
            code = checked_op(flat, op, scaled=True)
            own, tag = own_weight(weights, self.rank, self.size)
            path, program = self._algorithm_code(algorithm)
            weighting: dict[str, Any] = {"op": code, "scale": own, "own_scale": True, "tag": tag}
            call = CoreRequest("all_reduce", flat, flat.numel, algorithm=path, program=program, **weighting)
            return self._perform(call, lambda: x, async_op)
        plain = code <= _MAX and scale == 1.0  # allowed for every dtype but bool
        path, program = (_AUTOMATIC, -1) if algorithm is None else self._algorithm_code(algorithm)
        # A NumPy array, most often: one call into the core, which reads the array's header itself.
        if plain and x.__class__ is np.ndarray and not async_op and self._background is None:
            status = self._core.all_reduce_array(x, code, path, program)
            if status == _OK:
                return x
            if status != _UNSUITED:
                self._resolve(status, "all_reduce")
                return x
        elif plain and path == _AUTOMATIC and not async_op and self._perform_at_once(_ALL_REDUCE, x, op=op):
            return x
        flat = flatten(x)
        if not plain or flat.dtype == _BOOL:
            code = checked_op(flat, op, scaled=scale != 1.0)
        if async_op or (self._background is not None and self._must_queue()):
            call = CoreRequest("all_reduce", flat, flat.numel, op=code, algorithm=path, scale=scale, program=program)
            return self._perform(call, lambda: x, async_op)
        status = self._core.all_reduce(
            flat.address, flat.numel, flat.dtype, code, path, scale, flat.shape, 0, -1, 0, False, program, False
        )
        if status != _OK:
            self._resolve(status, "all_reduce")
        if flat.copy_back is not None:
            flat.write_back()
        return x

    def post(self, flat: Flat, op: int = _SUM, scale: float = 1.0) -> Callable[[], None]:
        """Begin a small all-reduce without waiting for anybody, and return what waits for the others and finishes it.

        In between the tensor is to be left alone, and nothing else may be called.

        Args:
            flat: The tensor, of at most `inline_bytes`.
            op: Code of the reduction, as `checked_op` gives it.
            scale: As for `all_reduce`, which other ranks may call with `algorithm="one_shot"` instead.
        """
        status = self._core.post(flat.address, flat.numel, flat.dtype, op, scale, flat.shape)
        if status != _OK:
            self._resolve(status, "all_reduce")
        return self._finish_posted

    def _finish_posted(self, collective: str = "all_reduce") -> None:
        status = self._core.finish_posted()
        if status != _OK:
            self._resolve(status, collective)

    def post_all_gather(self, flat: Flat, out: Flat) -> Callable[[], None] | None:
        """Begin a small all-gather as `post` does an all-reduce; None: it is not small, and nothing was begun.

        Args:
            flat: The tensor, of as many elements on every rank; other ranks may call `all_gather` instead.
            out: [size * numel], of the same dtype, apart from it.
        """
        status = self._core.post_all_gather(flat.address, out.address, flat.numel, flat.dtype)
        if status == _UNSUITED:
            return None
        if status != _OK:
            self._resolve(status, "all_gather")
        return self._finish_posted_gather

    def _finish_posted_gather(self) -> None:
        self._finish_posted("all_gather")

    def all_reduce_storage(self, flat: Flat, storage: Storage | None, *, scale: float, stamp_ns: int) -> None:
        """All-reduce (sum) a tensor that lies in a shareable storage which peers may not have mapped yet.

        Called by `pytorch/` on the communicator's background thread.

        Args:
            flat: The tensor.
            storage: The storage it lies in; None: a private tensor.
            scale: Multiplies each contribution.
            stamp_ns: When the tensor was ready, on the monotonic clock.
        """
        region, offset, fresh = _PRIVATE if storage is None else self.memory.register(storage, flat.address)
        status = self._core.all_reduce(
            flat.address, flat.numel, flat.dtype, _SUM, _AUTOMATIC, scale, flat.shape, stamp_ns,
            region, offset, fresh, -1, True,
        )  # fmt: skip
        if status != _OK:
            self._resolve(status, "all_reduce of a gradient bucket")

    def barrier(self) -> None:
        """Return when every rank has called it."""
        if self._background is not None and self._must_queue():
            self.submit(self.barrier).wait()  # on the thread it need not queue
        elif (status := self._core.barrier()) != _OK:
            self._resolve(status, "barrier")

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32) -> Any:
        """Return a new zero-filled tensor in memory that all ranks have mapped; every rank must call it alike.

        Args:
            shape: Equal on all ranks.
            dtype: A NumPy dtype gives a NumPy array, a torch dtype a torch CPU tensor.

        Raises:
            MismatchError: Ranks asked for different shapes or dtypes.
            RingsideError: There is not enough memory on some rank; nobody got any.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        code = dtype_code(dtype)
        size_bytes = math.prod(shape) * ITEM_BYTES[code]
        if min(shape, default=0) < 0:
            raise UsageError(f"a tensor cannot have the shape {shape}")
        if size_bytes >= 1 << 60:
            raise UsageError(f"no memory is large enough for the shape {shape}")

        def allocate() -> Any:
            self._resolve(self._core.agree_on_empty(size_bytes, code, shape), "empty")  # all asked for the same
            raw = self.memory.allocate(size_bytes)
            self._resolve(self._core.agree_on_empty(size_bytes, code, shape), "empty")  # everybody has it, or nobody
            return raw

        raw = self.submit(allocate).result() if self._must_queue() else allocate()
        return tensor_of(raw[:size_bytes], shape, dtype)

    def split(self, color: int | None, key: int | None = None) -> HostCommunicator | None:
        """Return a communicator over the ranks that give the same color; every rank must call it.

        The groups are disjoint and work at the same time, beside this communicator, which stays usable.

        Args:
            color: Names this rank's group; None: this rank is in none.
            key: Ranks in the group are ordered by it, and where it is equal by rank here; None: by rank here.

        Returns:
            The group's communicator (of one rank, if nobody else gave this color), or None without a color.

        Raises:
            UsageError: `color` or `key` is not an integer of 64 bits.
            MismatchError, PeerLostError, DeadlineError: As for every collective.
        """
        # All ranks gather what all of them gave, and each works out its own group.
        rows = np.zeros((self.size, 3), np.int64)
        rows[self.rank] = encode_split(color, key, self.rank)
        call = CoreRequest("split", flatten(rows), rows.size, equal_bounds(3, self.size))
        self._perform(call, lambda: rows, False)
        self._splits += 1
        if color is None:
            return None
        members = split_members(rows, self.rank)
        name = f"{self._secret}/split {self._splits}/{int(color)}"
        try:
            return HostCommunicator(name, members.index(self.rank), len(members), self.settings, members=members)
        except DeadlineError:
            dead = [r for r in members if has_ended(self._hub.pidfds[r])]
            if not dead:
                raise
            raise PeerLostError(f"split on rank {self.rank}: {CLOSED}: {name_ranks(dead)} died", dead) from None

    # -------------------------------------------------------------------------------------------- life

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Wait at most so long, a `timedelta` or seconds, for other ranks in one collective from now on."""
        timeout_s = timeout_seconds(timeout)
        self.settings = replace(self.settings, timeout_s=timeout_s)
        self.memory.timeout_s = timeout_s
        self._core.set_timeout(timeout_s)

    def absent(self) -> list[int]:
        """Return the ranks that have not arrived where this one waits; may be called on any thread."""
        return list(self._core.absent())

    def _release(self, finish_s: float) -> None:
        self._core.close()
        if self._background is not None:
            self._background.join()  # a job that still waited has been woken by now
        self._hub.close()

    def __repr__(self) -> str:
        return f"<ringside.HostCommunicator rank {self.rank} of {self.size}{', closed' if self._closed else ''}>"

    # -------------------------------------------------------------------------------------------- inside

    def _algorithm_code(self, algorithm: str | Schedule | None) -> tuple[int, int]:
        """Return the core's code of an algorithm, and the number of the compiled schedule, or -1."""
        if algorithm is None:
            return _AUTOMATIC, -1
        if algorithm == "one_shot":
            return _ONE_SHOT, -1
        if algorithm == "direct":
            return _DIRECT, -1
        if algorithm not in self._programs:
            if not isinstance(algorithm, Schedule):
                if algorithm not in ALGORITHMS:
                    known = sorted({"one_shot", *ALGORITHMS})
                    meant = did_you_mean(algorithm, known)
                    raise UsageError(f"there is no algorithm {algorithm!r}{meant}; there are {', '.join(known)}")
                by_domains = algorithm == "hierarchical" and self.domains
                schedule = over_groups(self.domains) if by_domains else by_name(algorithm, self.size)
            elif algorithm.ranks != self.size:
                raise UsageError(f"{algorithm.name} is for {algorithm.ranks} ranks, and there are {self.size}")
            elif algorithm.collective.name != "all_reduce":
                raise UsageError(f"{algorithm.name} is a {algorithm.collective.name}, not an all-reduce")
            else:
                schedule = algorithm
            checksum, rows = compile_schedule(schedule, self.rank)
            self._programs[algorithm] = self._core.add_program(checksum, schedule.rounds, schedule.chunks, rows)
        return _PROGRAM, self._programs[algorithm]

    def _perform_at_once(self, kind: int, x: Any, out: Any = None, op: Op = "sum", root: int = -1) -> bool:
        code = OP_CODES.get(op, -1) if op.__class__ is str else -1
        if not 0 <= code <= _MAX or (self._background is not None and self._must_queue()):
            return False
        if x.__class__ is np.ndarray:
            if out is not None and out.__class__ is not np.ndarray:
                return False
            status = self._core.collective_of_arrays(kind, x, out, code, root)
        else:
            try:
                if not (x.is_cpu and x.is_contiguous()):
                    return False
                dtype, data, shape, address, result = dtype_code(x.dtype), x.data_ptr(), x.shape, 0, None
                if out is not None:
                    if not (out.is_cpu and out.is_contiguous() and out.dtype == x.dtype):
                        return False
                    address, result = out.data_ptr(), out.shape
            except (AttributeError, RuntimeError, UnsupportedError):
                return False  # no tensor, or one without memory of its own: the long way says what is wrong
            if dtype == _BOOL:
                return False
            # Outside of the `try`: what a signal's handler raises meanwhile is the caller's.
            status = self._core.collective_of_tensors(kind, data, address, dtype, code, root, shape, result)
        if status == _UNSUITED:
            return False
        if status != _OK:
            self._resolve(status, KINDS[kind])
        return True

    def _perform(self, call: CoreRequest, result: Callable[[], Any], async_op: bool) -> Any:
        """Execute a collective here or, in its turn, on the communicator's thread; return what `result` gives."""

        def job(stamp_ns: int = 0, background: bool = False) -> Any:
            self.execute(call, stamp_ns, background)
            call.flat.write_back()
            return result()

        if not async_op and not self._must_queue():
            return job()
        stamp_ns = self._native.now_ns()  # this rank is ready now, whenever the thread comes to it
        work = self.submit(lambda: job(stamp_ns, True))
        return work if async_op else work.result()

    def execute(self, call: CoreRequest, stamp_ns: int, background: bool, storage: Storage | None = None) -> None:
        """Enter the core with a collective, on the thread that calls, whatever is queued.

        Args:
            call: What to do.
            stamp_ns: When the tensor was ready, on the monotonic clock; 0: now.
            background: Wait as beside a thread that computes.
            storage: The storage that the tensor lies in, which peers may not have mapped yet.
        """
        region = _PRIVATE if storage is None else self.memory.register(storage, call.flat.address)
        status = self._core.collective(*call.arguments(), stamp_ns, *region, call.program, background)
        self._resolve(status, call.kind)

    def prepared(self, call: CoreRequest, storage: Storage | None = None) -> Callable[[], None]:
        """Return `execute` of a collective in the background that is called again and again; arguments as for that."""
        # Everything that does not change from call to call is looked up here, once.
        enter, arguments, register = self._core.collective, call.arguments(), self.memory.register

        def again() -> None:
            region, offset, fresh = _PRIVATE if storage is None else register(storage, call.flat.address)
            status = enter(*arguments, 0, region, offset, fresh, call.program, True)
            if status != _OK:
                self._resolve(status, call.kind)

        return again

    def _resolve(self, status: int, collective: str) -> None:
        """Finish a collective that needs the peers' new memory first; raise where it failed."""
        if status == Status.exchange:
            self.memory.exchange()
            status = self._core.resume()
        if status != _OK:
            raise failures.error_of(self._core.failure(), collective, self.rank, self.settings.timeout_s, self._group)


_at_exit = AtExit()
