"""docs/json.md, made from the schemas in docs/schemas: what `--json` prints, key by key.

`python -m docs.generate.json_keys > docs/json.md` writes it; a test fails when it is stale.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).resolve().parents[1] / "schemas"

_HEAD = """# JSON output

What `--json` prints, made from the schemas in [schemas/](schemas/) by `python -m docs.generate.json_keys`. Times are
seconds, sizes bytes, ratios fractions (0.12 is 12%); what is not known is null. A key in *italics* is not always
there. New keys may be added without notice: ignore those that you do not know. `schema` changes where a key changes
its meaning or goes.
"""


def page() -> str:
    """Return the text of docs/json.md."""
    parts = [_HEAD]
    for path in sorted(SCHEMAS.glob("*.json")):
        schema = json.loads(path.read_text())
        command = schema["title"].removeprefix("`ringside ").removesuffix(" --json`")
        parts.append(f"\n## {command}\n\n{schema['title']}; schema: [{path.name}](schemas/{path.name}).\n")
        parts.append("\n".join(["\n| key | type | |", "|---|---|---|", *_rows(schema, "", schema["$defs"]), ""]))
        for name, shared in schema["$defs"].items():
            heading = f"\nWhere the type is *{name}*"
            about = shared.get("description", "").rstrip(".")
            parts.append(f"{heading}: {about[:1].lower() + about[1:]}.\n" if about else f"{heading}:\n")
            parts.append("\n".join(["\n| key | type | |", "|---|---|---|", *_rows(shared, "", schema["$defs"]), ""]))
    return "".join(parts)


def _rows(schema: dict[str, Any], prefix: str, shared: dict[str, Any]) -> Iterator[str]:
    """Yield a row for each key of an object, those of objects inside it below."""
    for key, part in schema["properties"].items():
        name = f"{prefix}{key}"
        words, inner, path = _kind(part, name)
        shown = f"`{name}`" if key in schema.get("required", ()) else f"*`{name}`*"
        yield f"| {shown} | {words} | {part.get('description', '')} |"
        if "properties" in inner:
            yield from _rows(inner, f"{path}.", shared)


def _kind(part: dict[str, Any], path: str) -> tuple[str, dict[str, Any], str]:
    """Return a type in words, the object inside it (empty: none) and the path of that object's keys."""
    if "$ref" in part:
        return f"*{part['$ref'].rpartition('/')[2]}*", {}, path
    if "anyOf" in part:
        return " or ".join(_kind(each, path)[0] for each in part["anyOf"]), {}, path
    if "enum" in part:
        return " or ".join(f"`{value}`" for value in part["enum"]), {}, path
    if part["type"] == "array":
        words, inner, inside = _kind(part["items"], f"{path}[]")
        return f"list of {words}", inner, inside
    words = part["type"] if isinstance(part["type"], str) else " or ".join(part["type"])
    if isinstance(part.get("additionalProperties"), dict):
        return f"object of {_kind(part['additionalProperties'], path)[0]}", {}, path
    return words, part, path


if __name__ == "__main__":
    print(page(), end="")
