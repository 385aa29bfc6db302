"""Text as it looks after terminals, editors and full disks: a reader has to make something of it, always the same."""

from __future__ import annotations

import numpy as np

STRAY = ("x", "-1", "0", "1e400", "7", "nan", ":", "", "{", "16M")


def mangled(text: str, random: np.random.Generator) -> str:
    """Return a text of which a line or a word is missing, doubled, replaced, joined with another, or the end is."""
    lines = text.split("\n")
    at = int(random.integers(len(lines)))
    words = lines[at].split(" ")
    word = int(random.integers(len(words)))
    way = int(random.integers(8))
    if way == 0:
        del lines[at]
    elif way == 1:
        lines.insert(int(random.integers(len(lines))), lines[at])
    elif way == 2:
        del words[word]
    elif way == 3:
        words.insert(word, words[word])
    elif way in (4, 5):
        words[word] = STRAY[int(random.integers(len(STRAY)))]
    elif way == 6 and at + 1 < len(lines):
        words.append(lines.pop(at + 1))
    else:
        return text[: int(random.integers(len(text)))]
    if way > 1:
        lines[at] = " ".join(words)
    return "\n".join(lines)
