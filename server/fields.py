"""Fields of JSON bodies: what each may be, how it is read, and its JSON Schema, declared once.

Must not know requests, engines or HTTP. `server/schema.py` and the protocols declare their requests
with it; errors, the reference pages and the OpenAPI document are all made from these declarations.
"""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NoReturn, TypeVar

from treadle.ir.errors import RequestError
from treadle.runtime.request import show_value

MAX_DEPTH = 64

R = TypeVar("R")


@dataclass(frozen=True)
class Check:
    """Say what a value must be, and read it: `read(value, path)` gives it in our own form.

    `schema` says the same as `expects`, as JSON Schema.
    """

    expects: str
    read: Callable[[Any, str], Any]
    schema: Mapping[str, Any] = field(default_factory=dict)


def refuse(path: str, expects: str, value: object, code: str = "invalid_value") -> NoReturn:
    """Raise the error for a value that is not what its field expects."""
    raise RequestError(
        f"Expected `{path}` to be {expects}, found {show_value(value)}.", param=path, code=code
    )


def boolean() -> Check:
    """Accept true and false."""
    expects = "true or false"

    def read(value: object, path: str) -> bool:
        return value if isinstance(value, bool) else refuse(path, expects, value, "invalid_type")

    return Check(expects, read, {"type": "boolean"})


def whole(least: int, most: int) -> Check:
    """Accept whole numbers of a range; `2.0` and `"2"` are not whole numbers."""
    expects = f"a whole number from {least} to {most}"

    def read(value: object, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(path, expects, value, "invalid_type")
        return value if least <= value <= most else refuse(path, expects, value)

    return Check(expects, read, {"type": "integer", "minimum": least, "maximum": most})


def number(least: float, most: float, *, above: bool = False) -> Check:
    """Accept finite numbers of a range; `above` leaves out its least one."""
    expects = f"a number {'above' if above else 'from'} {least:g} to {most:g}"

    def read(value: object, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(path, expects, value, "invalid_type")
        if not math.isfinite(value) or not least <= value <= most or (above and value == least):
            refuse(path, expects, value)
        return float(value)

    edge = "exclusiveMinimum" if above else "minimum"
    return Check(expects, read, {"type": "number", edge: least, "maximum": most})


def string(most_characters: int | None = None, least_characters: int = 0) -> Check:
    """Accept Unicode strings; half a surrogate pair is not Unicode."""
    expects = "a string"
    schema: dict[str, Any] = {"type": "string"}
    if least_characters:
        schema["minLength"] = least_characters
    if most_characters is not None:
        expects += f" of {least_characters} to {most_characters} characters"
        schema["maxLength"] = most_characters

    def read(value: object, path: str) -> str:
        if not isinstance(value, str):
            refuse(path, expects, value, "invalid_type")
        if len(value) < least_characters:
            refuse(path, expects, value)
        if most_characters is not None and len(value) > most_characters:
            refuse(path, expects, value)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"Expected `{path}` to be Unicode, found half of a surrogate pair at character "
                f"{error.start}.",
                param=path,
                code="invalid_text",
            ) from None
        return value

    return Check(expects, read, schema)


def one_of(*values: str) -> Check:
    """Accept one of a few strings."""
    expects = "one of " + ", ".join(repr(value) for value in values)

    def read(value: object, path: str) -> str:
        if not isinstance(value, str):
            refuse(path, expects, value, "invalid_type")
        return value if value in values else refuse(path, expects, value)

    return Check(expects, read, {"type": "string", "enum": list(values)})


def list_of(item: Check, most: int, least: int = 0) -> Check:
    """Accept lists whose entries all pass; long ones are refused before their entries are read."""
    expects = f"a list of {least} to {most} entries, each {item.expects}"

    def read(value: object, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            refuse(path, expects, value, "invalid_type")
        if not least <= len(value) <= most:
            refuse(path, expects, value)
        return tuple(item.read(entry, f"{path}.{index}") for index, entry in enumerate(value))

    schema: dict[str, Any] = {"type": "array", "items": item.schema, "maxItems": most}
    if least:
        schema["minItems"] = least
    return Check(expects, read, schema)


def one_or_many(item: Check, most: int) -> Check:
    """Accept one entry or a list of them; give a tuple."""
    many = list_of(item, most)
    expects = f"{item.expects}, or {many.expects}"

    def read(value: object, path: str) -> tuple[Any, ...]:
        return many.read(value, path) if isinstance(value, list) else (item.read(value, path),)

    return Check(expects, read, {"anyOf": [item.schema, many.schema]})


def json_object(refused_names: Iterable[str] = ()) -> Check:
    """Accept objects of any fields but the refused ones, not too deep."""
    expects = f"an object, at most {MAX_DEPTH} deep"
    refused = frozenset(refused_names)

    def read(value: object, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse(path, expects, value, "invalid_type")
        for name in refused.intersection(value):
            raise RequestError(
                f"Expected no `{name}` in `{path}`: the request has a field of that name.",
                param=path,
                code="reserved_name",
            )
        check_depth(value, path)
        return value

    schema: dict[str, Any] = {"type": "object", "additionalProperties": True}
    if refused:
        schema["propertyNames"] = {"not": {"enum": sorted(refused)}}
    return Check(expects, read, schema)


def object_of(kind: type[Any], others: Mapping[str, Check] | None = None) -> Check:
    """Accept objects with the fields that a class declares; `others` are checked and dropped."""
    names = ", ".join(f"`{one.name}`" for one in fields(kind))
    dropped = dict(others or {})
    return Check(
        f"an object with {names}",
        lambda value, path: read_fields(kind, dropped, value, path),
        object_schema(kind, dropped),
    )


def anything() -> Check:
    """Accept every JSON value, for fields that have no effect."""
    return Check("any value", lambda value, path: value)


def only(*values: object) -> Check:
    """Accept what asks for nothing: null or one of `values`. For features not there yet."""
    expects = " or ".join(["null", *(json.dumps(value) for value in values)])

    def read(value: object, path: str) -> None:
        # `0 == False` in Python, and they are two different wishes.
        if any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values):
            return
        raise RequestError(
            f"`{path}` is not supported yet: expected {expects}, found {show_value(value)}.",
            remedy="Leave it out.",
            param=path,
            code="unsupported_field",
        )

    return Check(expects, read, {"enum": [None, *values]})


def declare(check: Check, default: Any = MISSING, *, doc: str) -> Any:
    """Declare a field of a request. Without a default it is required; null means the default."""
    metadata = {"check": check, "doc": doc}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


# --- bodies ---------------------------------------------------------------------------------------


def parse_json(body: bytes) -> object:
    """Read strict JSON: UTF-8, no NaN, no field twice, nothing after it.

    Raises: RequestError: anything else; the message gives the place and not the body.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse_json(f"byte {error.start} is not UTF-8")
    try:
        return json.loads(text, object_pairs_hook=_unique_fields, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        _refuse_json(f"{error.msg} at line {error.lineno} column {error.colno}")
    except RecursionError:
        _refuse_json("it is nested too deeply")
    except ValueError as error:  # a number of thousands of digits
        _refuse_json(str(error))


def object_schema(kind: type[Any], others: Mapping[str, Check]) -> dict[str, Any]:
    """Give the JSON Schema of an object with a class's declared fields, and others without effect.

    Every field but a required one may be null, which means its default.
    """
    properties: dict[str, Any] = {}
    required = []
    for one in fields(kind):
        schema = dict(one.metadata["check"].schema)
        described = {"description": str(one.metadata["doc"])}
        if one.default is MISSING:
            required.append(one.name)
            properties[one.name] = schema | described
        else:
            default = {} if one.default is None else {"default": one.default}
            properties[one.name] = {"anyOf": [schema, {"type": "null"}]} | described | default
    for name, check in others.items():
        properties[name] = {"anyOf": [dict(check.schema), {"type": "null"}]}
    found = {"type": "object", "properties": properties, "additionalProperties": False}
    return found | ({"required": required} if required else {})


def read_fields(kind: type[R], others: Mapping[str, Check], value: object, path: str) -> R:
    """Read an object into a declared class; `others` are checked and dropped."""
    if not isinstance(value, dict):
        where = f"`{path}`" if path else "the body"
        raise RequestError(
            f"Expected {where} to be a JSON object, found {show_value(value)}.",
            param=path or None,
            code="invalid_type",
        )
    declared = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    check_names(value, (*declared, *others), path)
    for name, check in others.items():
        if value.get(name) is not None:
            check.read(value[name], _join(path, name))
    read = {}
    for name, one in declared.items():
        if value.get(name) is not None:
            read[name] = one.metadata["check"].read(value[name], _join(path, name))
        elif one.default is MISSING:
            found = "null" if name in value else "nothing"
            raise RequestError(
                f"Expected `{_join(path, name)}` to be {one.metadata['check'].expects}, "
                f"found {found}.",
                param=_join(path, name),
                code="missing_field",
            )
    return kind(**read)


def check_names(value: dict[str, Any], known: tuple[str, ...], path: str) -> None:
    for name in value:
        if name in known:
            continue
        close = difflib.get_close_matches(name[:64], known, n=1)
        where = f" of `{path}`" if path else ""
        raise RequestError(
            f"Unknown field {show_value(name)}{where}.",
            remedy=f"Did you mean `{close[0]}`?" if close else "Leave it out.",
            param=_join(path, name[:64]),
            code="unknown_field",
        )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def check_depth(value: object, path: str) -> None:
    """Refuse what a recursive reader, such as a template's `tojson`, would choke on."""
    layer: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not layer:
            return
    raise RequestError(
        f"Expected `{path}` to be at most {MAX_DEPTH} deep, found it deeper.",
        param=path,
        code="invalid_value",
    )


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        _refuse_json(f"the field {show_value(twice)} is given twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    _refuse_json(f"{name} is not a JSON value")


def _refuse_json(reason: str) -> NoReturn:
    raise RequestError(f"Expected the body to be JSON: {reason}.", code="invalid_json")
