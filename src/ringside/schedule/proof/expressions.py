"""Symbolic values: which additions, in which order, made the content of a chunk.

Every distinct expression has one number (hash-consing), so "the same value bit for bit" is an integer comparison.
The two operands of one addition are unordered, because IEEE addition commutes; it does not associate, so the tree
matters.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from ringside.schedule.collective import Table
from ringside.schedule.schedule import Round

Ids = NDArray[np.int64]

# A broken schedule can double a value in every round; counting stops here, long before int64 overflows.
MANY = 2**60


class Expressions:
    """A growing pool of sums. Expression `chunk * ranks + rank` is what a rank holds of a chunk at the start.

    Args:
        ranks: Number of vertices, switches included.
        chunks: Number of chunks.
        holds: Who really holds something at the start, bool [ranks, chunks]. What others hold is undefined: it is
            written `?r` instead of `xr`.
    """

    def __init__(self, ranks: int, chunks: int, holds: Table) -> None:
        self.ranks = ranks
        self.leaves = ranks * chunks
        self._holds = holds
        self._operands: list[tuple[int, int]] = []
        self._origins: list[tuple[int, int]] = []
        self._ids: dict[int, int] = {}
        self._batches: list[int] = [0]

    def start(self) -> Ids:
        """Return the state before the first round, int64 [ranks, chunks]: every chunk holds its own contribution."""
        state: Ids = np.arange(self.leaves, dtype=np.int64).reshape(-1, self.ranks).T.copy()
        return state

    def add(self, left: Ids, right: Ids, rank: Ids, round_number: int) -> Ids:
        """Return the expressions `left + right`, elementwise, int64 [n], as made by `rank` [n] in a round."""
        keys = np.minimum(left, right) << 32 | np.maximum(left, right)
        ids, known, new = [], self._ids, self.leaves + len(self._operands)
        fresh = []
        for i, key in enumerate(keys.tolist()):
            found = known.setdefault(key, new)
            if found == new:
                fresh.append(i)
                new += 1
            ids.append(found)
        if fresh:
            self._operands += zip(left[fresh].tolist(), right[fresh].tolist(), strict=True)
            self._origins += [(maker, round_number) for maker in rank[fresh].tolist()]
            self._batches.append(len(self._operands))
        return np.array(ids, dtype=np.int64)

    def add_one(self, left: int, right: int, rank: int, round_number: int) -> int:
        """Return the expression `left + right`, as made by `rank` in a round."""
        new = self.leaves + len(self._operands)
        found = self._ids.setdefault(min(left, right) << 32 | max(left, right), new)
        if found == new:
            self._operands.append((left, right))
            self._origins.append((rank, round_number))
            self._batches.append(len(self._operands))
        return found

    def operands(self, expression: int) -> tuple[int, int] | None:
        """Return the two operands of a sum as they were first written, or None for a rank's own contribution."""
        return None if expression < self.leaves else self._operands[expression - self.leaves]

    def origin(self, expression: int) -> tuple[int, int]:
        """Return the (rank, round) that first made a sum."""
        return self._origins[expression - self.leaves]

    def sizes_and_sets(self) -> tuple[Ids, NDArray[np.uint64]]:
        """Return of every expression how many contributions it adds up, and which.

        Returns:
            Sizes int64 [expressions], counting repetitions (capped at `MANY`), and sets uint64
            [expressions, ceil(ranks/64)], bit r of which says whether rank r is in.
        """
        total = self.leaves + len(self._operands)
        sizes = np.ones(total, dtype=np.int64)
        sets = np.zeros((total, -(-self.ranks // 64)), dtype=np.uint64)
        rank = np.arange(self.leaves) % self.ranks
        sets[np.arange(self.leaves), rank // 64] = np.uint64(1) << (rank % 64).astype(np.uint64)
        pairs = np.array(self._operands, dtype=np.int64).reshape(-1, 2)
        # The operands of a batch were all made before it, so one pass in order of making suffices.
        for low, high in zip(self._batches, self._batches[1:], strict=False):
            left, right = pairs[low:high].T
            made = slice(self.leaves + low, self.leaves + high)
            sizes[made] = np.minimum(sizes[left] + sizes[right], MANY)
            sets[made] = sets[left] | sets[right]
        return sizes, sets

    def reachable(self, expression: int) -> list[int]:
        """Return the expressions that `expression` is made of, itself first, each once, newest first."""
        seen, todo = {expression}, [expression]
        while todo:
            new = set(self.operands(todo.pop()) or ()) - seen
            seen |= new
            todo.extend(new)
        return sorted(seen, reverse=True)

    def contributors(self, expression: int) -> Counter[int]:
        """Return how often each rank's contribution is in the expression."""
        times: Counter[int] = Counter({expression: 1})
        found: Counter[int] = Counter()
        for node in self.reachable(expression):
            operands = self.operands(node)
            if operands is None:
                found[node % self.ranks] += times[node]
            for operand in operands or ():
                times[operand] += times[node]
        return found

    def left_folds(self, expressions: Ids, chunks: Ids, members: Ids) -> NDArray[np.bool_]:
        """Return which expressions, [n], of the given chunks, [n], are ((x0+x1)+x2)+... over ascending `members`."""
        pairs = np.array([*self._operands, (-1, -1)], dtype=np.int64)
        current, right = expressions.copy(), np.ones(len(expressions), dtype=np.bool_)
        for rank in members[:0:-1].tolist():
            if not right.any():
                return right
            leaf = chunks * self.ranks + rank
            left_operand, right_operand = pairs[np.where(current >= self.leaves, current - self.leaves, -1)].T
            right &= (left_operand == leaf) | (right_operand == leaf)
            current = np.where(left_operand == leaf, right_operand, left_operand)
        right &= current == chunks * self.ranks + members[0]
        return right

    def text(self, expression: int, longest: int | None = None, turn: int = 0) -> str:
        """Return the expression in readable form, such as `((x0+x1)+x2)`.

        Args:
            expression: Which one.
            longest: Cut it off after so many characters.
            turn: Add this to every rank's number, modulo the ranks.
        """
        pieces: list[str] = []
        todo: list[int | str] = [expression]
        length = 0
        while todo and (longest is None or length < longest):
            node = todo.pop()
            operands = None if isinstance(node, str) else self.operands(node)
            if operands is not None:
                todo.extend([")", operands[1], "+", operands[0], "("])
            else:
                if not isinstance(node, str):  # a leaf: what a rank held at the start, `?` where that is undefined
                    chunk, rank = divmod(node, self.ranks)
                    node = f"{'x' if self._holds[rank, chunk] else '?'}{(rank + turn) % self.ranks}"
                pieces.append(node)
                length += len(node)
        return "".join(pieces) + ("…" if todo else "")


def advance(pool: Expressions, state: Ids, step: Round, k: int, ranks: int) -> None:
    """Take a state, int64 [vertices, chunks] of expressions, through a well-formed round, the k-th.

    Args:
        pool: Where the state's expressions live.
        state: Changed in place.
        step: The round.
        k: Its number.
        ranks: Vertices from here on are switches.
    """
    copy, add = step.where(~step.reduce), step.where(step.reduce)
    copied = state[copy.src, copy.chunk]  # before the sums: a round's values are those at its start
    if len(add):
        chunks = state.shape[1]
        targets = np.unique(add.dst.astype(np.int64) * chunks + add.chunk)
        rank, chunk = np.divmod(targets, chunks)
        state[rank, chunk] = _fold(pool, state, add, targets, k, ranks)
    state[copy.dst, copy.chunk] = copied


def _fold(pool: Expressions, state: Ids, add: Round, targets: Ids, k: int, ranks: int) -> Ids:
    """Add up what arrives at each target (flat index into state) with a rank's own value, in ascending rank order."""
    chunks = state.shape[1]
    maker = targets // chunks
    own_rank, own_chunk = np.divmod(targets[maker < ranks], chunks)
    target = np.concatenate([add.dst.astype(np.int64) * chunks + add.chunk, targets[maker < ranks]])
    rank = np.concatenate([add.src, own_rank])
    value = np.concatenate([state[add.src, add.chunk], state[own_rank, own_chunk]])
    order = np.lexsort((rank, target))
    first = np.searchsorted(target[order], targets)
    count = np.diff(np.append(first, len(target)))
    # The left fold, one operand of all targets at a time: pool.add takes arrays.
    result: Ids = value[order[first]]
    for place in range(1, int(count.max())):
        more = np.flatnonzero(count > place)
        result[more] = pool.add(result[more], value[order[first[more] + place]], maker[more], k)
    return result
