"""Small faults of the sources, drawn from a seed: comparisons, constants, signs; calls and conditions dropped."""

from __future__ import annotations

import ast
import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = (ROOT / "src" / "ringside", ROOT / "verification")
NATIVE = "_core (C++)"

LEAST_OF_A_PACKAGE = 4
LEAST_NATIVE = 15


@dataclass(frozen=True)
class Fault:
    """One piece of one file, and what stands there instead.

    Args:
        path: Of the file, from the root of the repository.
        start: Where the piece begins, characters from the file's begin.
        before: The piece.
        after: What stands there instead.
        line: Of the piece, from 1.
        statement: The line on which its statement begins; 0 outside of functions: it runs when the module is imported.
    """

    path: str
    start: int
    before: str
    after: str
    line: int
    statement: int = 0

    @property
    def package(self) -> str:
        if Path(self.path).suffix != ".py":
            return NATIVE
        parts = Path(self.path.removeprefix("src/ringside/")).parts
        return parts[0] if len(parts) > 1 else "(top)"

    @property
    def key(self) -> str:
        """What names it as long as its file does not change."""
        digest = hashlib.sha256((ROOT / self.path).read_bytes()).hexdigest()[:8]
        return f"{self.path}:{self.line} {self.start} {self.before!r} -> {self.after!r} {digest}"

    def __str__(self) -> str:
        text = (ROOT / self.path).read_text()
        begin = text.rfind("\n", 0, self.start) + 1
        end = text.find("\n", self.start + len(self.before))
        old, new = text[begin:end].strip(), self.applied(text)[begin : end + len(self.after) - len(self.before)].strip()
        return f"{self.path}:{self.line}: {' '.join(old.split())}  ->  {' '.join(new.split()) or '(nothing)'}"

    def applied(self, text: str) -> str:
        """Return the file's text with the fault."""
        assert text[self.start :].startswith(self.before), self
        return text[: self.start] + self.after + text[self.start + len(self.before) :]


def draw(seed: int, count: int) -> list[Fault]:
    """Draw faults: the least number from every package and from the C++ sources, and the rest from all of them alike.

    Args:
        seed: The same one draws the same faults of the same sources.
        count: How many, in all.
    """
    chance = random.Random(seed)
    rooms: dict[str, list[Fault]] = {}
    for path in (path for folder in SOURCES for path in sorted(folder.rglob("*"))):
        if path.suffix == ".py":
            found = list(of_python(path))
        elif path.suffix in (".cpp", ".hpp"):
            found = list(of_cpp(path))
        else:
            continue
        for fault in found:
            rooms.setdefault(fault.package, []).append(fault)
    drawn: list[Fault] = []
    for room in sorted(rooms):
        least = LEAST_NATIVE if room == NATIVE else LEAST_OF_A_PACKAGE
        drawn += chance.sample(rooms[room], min(least, len(rooms[room])))
    rest = sorted(
        {fault for room in rooms.values() for fault in room} - set(drawn), key=lambda f: (f.path, f.start, f.after)
    )
    drawn += chance.sample(rest, max(0, count - len(drawn)))
    return drawn


_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
}
_SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}


def of_python(path: Path) -> Iterator[Fault]:
    """Yield every fault of one module. Words that are only shown, annotations and decorators are left as they are."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))

    def at(line: int, column: int) -> int:  # ast counts columns in bytes
        return begins[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def fault(start: int, before: str, after: str, statement: int) -> Fault:
        line = text.count("\n", 0, start) + 1
        return Fault(str(path.relative_to(ROOT)), start, before, after, line, statement)

    def whole(node: ast.expr | ast.stmt) -> tuple[int, str]:
        start = at(node.lineno, node.col_offset)
        return start, text[start : at(node.end_lineno or node.lineno, node.end_col_offset or 0)]

    def between(left: ast.expr, right: ast.expr, old: str, new: str, statement: int) -> Iterator[Fault]:
        start = at(left.end_lineno or left.lineno, left.end_col_offset or 0)
        gap = text[start : at(right.lineno, right.col_offset)]
        if gap.strip("() \n\\") == old:  # and no comment, which may hold it, too
            yield fault(start + gap.index(old), old, new, statement)

    def visit(node: ast.AST, statement: int, inside: bool) -> Iterator[Fault]:
        if isinstance(node, ast.stmt):
            statement = node.lineno if inside else 0
        skipped: set[int] = set()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if any(getattr(one, "id", "") == "overload" for one in node.decorator_list):  # read by type checkers alone
                return
            skipped |= {id(decorator) for decorator in node.decorator_list}
            inside = inside or not isinstance(node, ast.ClassDef)
        elif isinstance(node, ast.arg | ast.Raise | ast.JoinedStr | ast.Assert):
            return
        elif isinstance(node, ast.AnnAssign):
            skipped.add(id(node.annotation))
        if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: it only tells that a caller is wrong
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(node.left, node.comparators[0], *_COMPARISONS[type(node.ops[0])], statement)
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            texts = [side for side in (node.left, node.right) if isinstance(side, ast.JoinedStr | ast.Constant)]
            if not any(isinstance(getattr(side, "value", ""), str) for side in texts):
                yield from between(node.left, node.right, *_ARITHMETIC[type(node.op)], statement)
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from between(node.values[0], node.values[1], old, new, statement)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            start, _ = whole(node)
            old = "not " if isinstance(node.op, ast.Not) else "-"
            if text.startswith(old, start):
                yield fault(start, old, "", statement)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            start, before = whole(node)
            after = str(
                not node.value if isinstance(node.value, bool) else node.value + 1 if node.value < 2 else node.value * 2
            )
            if re.fullmatch(r"[\w.]+", before):
                yield fault(start, before, after, statement)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _SWAPPED:
            start, before = whole(node.func)
            yield fault(start, before, _SWAPPED[before], statement)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and inside:
            yield fault(*whole(node), "pass", statement)
        elif isinstance(node, ast.If | ast.IfExp):
            for constant in ("True", "False"):
                yield fault(*whole(node.test), constant, statement)
        for name, child in ast.iter_fields(node):
            for one in child if isinstance(child, list) else [child]:
                if isinstance(one, ast.AST) and id(one) not in skipped and name not in ("returns", "annotation"):
                    yield from visit(one, statement, inside)

    yield from visit(ast.parse(text), 0, False)


_TOKENS = {
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " == ": " != ",
    " != ": " == ",
    " && ": " || ",
    " || ": " && ",
    " + ": " - ",
    " - ": " + ",
    " % ": " / ",
    " / ": " * ",
}


def of_cpp(path: Path) -> Iterator[Fault]:
    """Yield every fault of one C++ source: operators between spaces, numbers, and calls that are a statement."""
    text = path.read_text()
    # Comments, strings and directives become as many blanks, so that places stay.
    code = re.sub(
        r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^#[^\n]*|static_assert\([^;]*;',
        lambda found: re.sub(r"[^\n]", " ", found[0]),
        text,
        flags=re.S | re.M,
    )
    name = str(path.relative_to(ROOT))

    def fault(start: int, before: str, after: str) -> Fault:
        return Fault(name, start, before, after, text.count("\n", 0, start) + 1)

    for token, other in _TOKENS.items():
        for found in re.finditer(re.escape(token), code):
            yield fault(found.start(), token, other)
    for found in re.finditer(r"(?<![\w.'])\d+(?![\w.'])", code):
        yield fault(found.start(), found[0], str(int(found[0]) + 1))
    for found in re.finditer(r"^ +((?:[a-z_]\w*(?:\.|->|::))*[a-z_]\w*\([^;{}]*\);)$", code, flags=re.M):
        if not found[1].startswith(("return", "throw")):
            yield fault(found.start(1), text[found.start(1) : found.end(1)], ";")
