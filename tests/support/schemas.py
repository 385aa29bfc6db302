"""Whether what a command printed as JSON is what its schema in docs/schemas describes, and nothing else."""

from __future__ import annotations

import json
from typing import Any

from docs.generate.json_keys import SCHEMAS


def departures(name: str, data: Any) -> list[str]:
    """Return where printed data departs from a schema, a line each; a key that is not described is a departure too.

    Nothing where jsonschema is not installed: tests/test_schemas.py skips there, and says so.
    """
    try:
        import jsonschema
    except ImportError:
        return []
    validator = jsonschema.Draft202012Validator(_strict(json.loads((SCHEMAS / f"{name}.json").read_text())))
    return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(data)]


def _strict(schema: Any) -> Any:
    """Return a schema in which an object has no key but those that are described."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return closed | {key: _strict(part) for key, part in schema.items()}
