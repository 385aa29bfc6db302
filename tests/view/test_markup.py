"""No text reaches a page unescaped: templates stand in the source, and what fills them is escaped."""

from __future__ import annotations

import ast
from pathlib import Path

from ringside.view import html
from ringside.view.html.markup import Markup, embed_json, fill
from ringside.view.html.page import render_page, table, verdict_section

ROOT = Path(html.__file__).parents[1]
NOT_LITERAL = {
    ("html/page.py", "read_asset"): "the package's own styles and scripts",
    ("html/simulation.py", "frame_svg"): "a drawing, which escapes the names it holds",
}
"""Calls whose result stands in a page as it is, each with its reason."""


def test_texts_are_escaped_and_html_and_numbers_stand_as_they_are() -> None:
    assert fill("<p>{}</p>", "<b>&'\"") == "<p>&lt;b&gt;&amp;&#x27;&quot;</p>"
    assert fill('<i x="{x:.1f}">{more}</i>', x=1.25, more=[Markup("<b>"), fill("{}", "<")]) == '<i x="1.2"><b>&lt;</i>'
    assert fill("{}{}", None, "") == ""
    assert type(fill("{}", [Markup("<p>"), Markup("</p>")])) is Markup


def test_what_is_done_to_html_makes_text_of_it_again() -> None:
    assert fill("{}", Markup("<b>") + "<i>") == "&lt;b&gt;&lt;i&gt;"


def test_json_in_a_page_ends_no_script() -> None:
    assert "<" not in embed_json({"name": "</script><script>"})


def test_a_page_and_its_sections_escape_every_text() -> None:
    evil = "<script>alert(1)</script>"
    sections = [
        verdict_section(evil, evil, [(evil, evil)], kind=evil, mark=evil),
        table(evil, (evil, evil), [(evil, evil)], evil),
    ]
    assert evil not in render_page(evil, evil, evil, sections)


def test_templates_and_html_stand_in_the_source() -> None:
    calls = 0
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name == "html/markup.py":
            continue
        tree = ast.parse(path.read_text())
        assigned = {
            target.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Markup", "fill"):
                calls += 1
                first = node.args[0]
                first = assigned.get(first.id, first) if isinstance(first, ast.Name) else first
                choices = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
                if not all(isinstance(choice, ast.Constant) for choice in choices):
                    called = first.func.id if isinstance(first, ast.Call) and isinstance(first.func, ast.Name) else ""
                    assert (name, called) in NOT_LITERAL, f"{name}:{node.lineno}"
    assert calls > 60
