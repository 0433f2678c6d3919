"""How requests ask for structured output: OpenAI's `response_format`, vLLM's `structured_outputs`.

Must not know engines or HTTP. `server/schema.py` declares fields with these checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from treadle.runtime.request import JSON_OBJECT, Structure
from treadle.server.fields import Check, json_object, list_of, refuse, string

MAX_PATTERN_CHARS = 100_000
MAX_CHOICES_TO_WRITE = 4_096

_OBJECT = json_object()
_PATTERN = string(MAX_PATTERN_CHARS, 1)
_CHOICES = list_of(string(MAX_PATTERN_CHARS, 1), MAX_CHOICES_TO_WRITE, 1)
_DESCRIPTION = ("name", "description", "schema", "strict")


def _read_schema(value: object, path: str) -> Structure:
    """Read a JSON Schema: an object, or one written as a string."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            refuse(path, "a JSON Schema", value)
    schema = _OBJECT.read(value, path)
    return Structure("json_schema", json.dumps(schema, sort_keys=False), path)


def _read_described_schema(value: object, path: str) -> Structure:
    """Read OpenAI's wrapping of a schema; its name and description say nothing about the form."""
    described = _OBJECT.read(value, path)
    for name in described:
        if name not in _DESCRIPTION:
            refuse(f"{path}.{name}", f"one of {', '.join(_DESCRIPTION)}", name, "unknown_field")
    if described.get("schema") is None:
        refuse(f"{path}.schema", "a JSON Schema", None, "missing_field")
    return _read_schema(described["schema"], f"{path}.schema")


# By `type`: the field that says more, and how it is read.
_FORMATS: dict[str, tuple[str, Callable[[Any, str], Structure | None]]] = {
    "text": ("", lambda value, path: None),
    "json_object": ("", lambda value, path: JSON_OBJECT),
    "json_schema": ("json_schema", _read_described_schema),
    "regex_schema": (
        "regex_schema",
        lambda value, path: Structure("regex", _PATTERN.read(value, path), path),
    ),
}


def _read_response_format(value: object, path: str) -> Structure | None:
    wanted = _OBJECT.read(value, path)
    kind = wanted.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        refuse(f"{path}.type", f"one of {', '.join(_FORMATS)}", kind)
    name, read = _FORMATS[kind]
    for other in wanted:
        if other not in ("type", name):
            refuse(f"{path}.{other}", f"absent where `type` is {kind}", wanted[other])
    if name and wanted.get(name) is None:
        refuse(f"{path}.{name}", "given", None, "missing_field")
    return read(wanted.get(name), f"{path}.{name}")


RESPONSE_FORMAT = Check(
    "an object whose `type` is text, json_object, json_schema (with `json_schema.schema`) or "
    "regex_schema (with `regex_schema`)",
    _read_response_format,
    {
        "type": "object",
        "properties": {"type": {"enum": list(_FORMATS)}},
        "required": ["type"],
    },
)


def _read_choices(value: object, path: str) -> Structure:
    return Structure("choice", json.dumps(_CHOICES.read(value, path)), path)


def _read_json_object(value: object, path: str) -> Structure | None:
    if not isinstance(value, bool):
        refuse(path, "true or false", value, "invalid_type")
    return JSON_OBJECT if value else None


# By vLLM's names.
_FORMS: dict[str, Callable[[Any, str], Structure | None]] = {
    "json": _read_schema,
    "json_object": _read_json_object,
    "regex": lambda value, path: Structure("regex", _PATTERN.read(value, path), path),
    "choice": _read_choices,
    "grammar": lambda value, path: Structure("grammar", _PATTERN.read(value, path), path),
}


# By the names that vLLM had before `structured_outputs`: fields of the request itself.
GUIDED = {
    f"guided_{kind}": Check(expects, _FORMS[kind], schema)
    for kind, expects, schema in (
        ("json", "a JSON Schema, as an object or a string", {"type": ["object", "string"]}),
        ("regex", _PATTERN.expects, _PATTERN.schema),
        ("choice", _CHOICES.expects, _CHOICES.schema),
        ("grammar", _PATTERN.expects, _PATTERN.schema),
    )
}


def _read_structured_outputs(value: object, path: str) -> Structure | None:
    wanted = {name: one for name, one in _OBJECT.read(value, path).items() if one is not None}
    for name in wanted:
        if name not in _FORMS:
            refuse(f"{path}.{name}", f"one of {', '.join(_FORMS)}", name, "unknown_field")
    if len(wanted) != 1:
        refuse(path, f"an object with one of {', '.join(_FORMS)}", value)
    ((name, one),) = wanted.items()
    return _FORMS[name](one, f"{path}.{name}")


STRUCTURED_OUTPUTS = Check(
    f"an object with one of {', '.join(_FORMS)}",
    _read_structured_outputs,
    {"type": "object", "properties": {name: {} for name in _FORMS}, "maxProperties": 1},
)


def _read_flat_format(value: object, path: str) -> tuple[Structure | None, dict[str, Any]]:
    """Read a format whose schema stands beside its type; give it as it was sent too."""
    wanted = _OBJECT.read(value, path)
    kind = wanted.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        refuse(f"{path}.type", "one of text, json_object, json_schema", kind)
    known = ("type", *_DESCRIPTION) if kind == "json_schema" else ("type",)
    for name in wanted:
        if name not in known:
            refuse(f"{path}.{name}", f"absent where `type` is {kind}", wanted[name])
    if kind == "text":
        return None, wanted
    if kind == "json_object":
        return JSON_OBJECT, wanted
    if wanted.get("schema") is None:
        refuse(f"{path}.schema", "a JSON Schema", None, "missing_field")
    return _read_schema(wanted["schema"], f"{path}.schema"), wanted


FLAT_FORMAT = Check(
    "an object whose `type` is text, json_object or json_schema (with `schema`)",
    _read_flat_format,
    {
        "type": "object",
        "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
        "required": ["type"],
    },
)
