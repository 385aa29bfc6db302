"""The four questions of a profile with their answers, in words and for pages."""

from __future__ import annotations

import html
from collections.abc import Mapping

from ringside.monitor.questions import QUESTIONS, Question
from ringside.text import figure, title


def sign(question: Question) -> str:
    """Return `yes`, `no`, or a dash where it cannot be told."""
    return "–" if question.answer is None else "yes" if question.answer else "no"


def answer(question: Question) -> str:
    """Return `Yes.`, `No.` or that it cannot be told, and why."""
    said = "It cannot be told" if question.answer is None else "Yes" if question.answer else "No"
    return f"{said}. {sentence(question.words)}".strip()


def answers_section(answers: Mapping[str, Question]) -> str:
    """Return the questions that were asked, with answers and numbers, as a section of a page; empty if there are none.

    Args:
        answers: By their names in `QUESTIONS`.
    """
    rows = []
    for name, text in QUESTIONS.items():
        question = answers.get(name)
        if question is not None:
            said = sign(question)
            numbers = " · ".join(f"{title(key)} {figure(key, value)}" for key, value in question.numbers.items())
            rows.append(
                f'<li><b class="{said}">{said}</b><div><p>{html.escape(text)}</p>'
                f'<p class="words">{html.escape(sentence(question.words) or answer(question))}</p>'
                f'<p class="numbers">{html.escape(numbers)}</p></div></li>'
            )
    if not rows:
        return ""
    return f"""<section class="details" aria-label="Questions"><h2>Four questions of every profile</h2>
<ul class="questions">{"".join(rows)}</ul></section>"""


def sentence(text: str) -> str:
    """Return text as a sentence: a capital first, a full stop at its end."""
    return "" if not text else text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
