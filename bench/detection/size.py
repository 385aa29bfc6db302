"""How big the decision is who is slow: lines of code and numbers of every file that has a part in it.

    python -m bench.detection.size [--json]

Counted are lines that hold code (no blank lines, comments and docstrings) and numbers other than 0, 1 and 2, wherever
they stand: in constants, tables and expressions. The goal is at most 700 lines and 30 numbers.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from pathlib import Path

from bench.common import ROOT, make_parser, markdown_table

MONITOR = ROOT / "src/ringside/monitor"
FILES = {
    "slow_rank/detector.py": "steps in, verdicts out: slow, or more work",
    "slow_rank/window_test.py": "the one test",
    "slow_rank/noise.py": "its bars",
    "slow_rank/pauses.py": "pauses",
    "slow_rank/watcher.py": "with whom it is compared, and what is worth telling",
    "undecided.py": "the same as a value, and in words",
    "assessment.py": "how sure no verdict makes us",
}
UNCOUNTED = {0, 1, 2}
GOAL = (700, 30)
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count(source: str) -> tuple[int, list[float]]:
    """Return how many lines of a source hold code, and its numbers."""
    tree = ast.parse(source)
    words: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and _is_counted(node.value)]
    return len(lines - words), sorted(numbers)


def _is_counted(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value not in UNCOUNTED


def main() -> None:
    """Print the table."""
    parser = make_parser("bench.detection.size", __doc__)
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    options = parser.parse_args()
    counts = {name: count(Path(MONITOR / name).read_text()) for name in FILES}
    if options.json:
        print(json.dumps({name: {"lines": lines, "numbers": numbers} for name, (lines, numbers) in counts.items()}))
        return
    rows = [[name, FILES[name], f"{lines}", f"{len(numbers)}"] for name, (lines, numbers) in counts.items()]
    total = [sum(lines for lines, _ in counts.values()), sum(len(numbers) for _, numbers in counts.values())]
    rows += [["all", "", *map(str, total)], ["goal", "", *map(str, GOAL)]]
    print(markdown_table(("file", "decides", "lines", "numbers"), rows))


if __name__ == "__main__":
    main()
