"""docs/commands.md, made from the parsers: what `--help` says, the same on every Python and in every terminal.

`python -m docs.generate.commands > docs/commands.md` writes it; a test fails when it is stale.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from ringside.commands import build_parser, parts_of

_HEAD = """# Commands

Made from the parsers by `python -m docs.generate.commands`; `ringside VERB --help` says the same. Exit statuses:
0 fine, 1 it ran and found something wrong, 2 usage error, 130 interrupted; where a verb
has others, it says so. Data goes to stdout, progress and warnings to stderr. `ringside --version` prints what an
issue needs: version, torch, Python, platform, native core.

Completion: `ringside --print-completion bash` prints what makes bash complete verbs, flags, choices and files; zsh and
fish likewise. It needs `pip install 'torch-ringside[completion]'` once, when it is printed:

```text
ringside --print-completion bash > ~/.local/share/bash-completion/completions/ringside
ringside --print-completion zsh  > ~/.zfunc/_ringside          # a folder in $fpath
ringside --print-completion fish > ~/.config/fish/completions/ringside.fish
```
"""


def handbook() -> str:
    """Return the text of docs/commands.md."""
    return _HEAD + "".join(text for parser in parts_of(build_parser()).values() for text in _section(parser))


def _section(parser: argparse.ArgumentParser, level: str = "##") -> Iterator[str]:
    usage = f"usage: {parser.usage}\n\n" if parser.usage else ""
    yield f"\n{level} {parser.prog}\n\n```text\n{usage}{(parser.description or '').strip()}\n```\n"
    # The table lists neither the sub-commands, which follow, nor what the parser hides.
    left_out = (argparse._SubParsersAction, argparse._HelpAction)
    rows = []
    for action in parser._actions:
        if isinstance(action, left_out) or action.help == argparse.SUPPRESS:
            continue
        # `-n, --ranks RANKS`, or the name of a positional argument.
        value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
        value = " ".join(value) if isinstance(value, tuple) else value
        if action.nargs == 0:
            value = ""
        elif action.choices is not None:
            value = "{" + ",".join(map(str, action.choices)) + "}"
        name = f"{', '.join(action.option_strings)} {value}".strip()
        text = parser._get_formatter()._expand_help(action) if action.help else ""
        rows.append(f"| `{name}` | {text.replace('|', chr(92) + '|')} |")
    if rows:
        yield "\n".join(["\n| argument | |", "|---|---|", *rows, ""])
    for part in parts_of(parser).values():
        yield from _section(part, level + "#")


if __name__ == "__main__":
    print(handbook(), end="")
