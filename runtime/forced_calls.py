"""Forced tool calls: the grammar of calls in each form that a model writes them in.

Must not know protocols or engines. The server asks for a structure when a request forces a call;
`runtime/answer_formats.py` reads what comes of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from treadle.runtime.request import Structure

MAX_FORCED_CALLS = 16


@dataclass(frozen=True)
class CallForm:
    """Say how one call is written: texts before and after a JSON object of name and arguments.

    `separator` stands between calls; None: there is one call only.
    """

    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    arguments_field: str = "arguments"
    separator: str | None = None


# By the name of the format in `runtime/call_formats.py`; the others are no JSON.
CALL_FORMS = {
    "hermes": CallForm(("<tool_call>", "\n"), ("\n", "</tool_call>"), separator="\n"),
    "internlm": CallForm(
        ("<|action_start|>", "<|plugin|>", "\n"), ("<|action_end|>",), "parameters"
    ),
    "mistral": CallForm(("[TOOL_CALLS]", "["), ("]",)),
    "llama3": CallForm(arguments_field="parameters"),
}


def force_calls(
    form: CallForm,
    tools: Mapping[str, Mapping[str, Any]],
    special_id: Callable[[str], int | None],
    *,
    several: bool,
    is_opened: bool = False,
    param: str = "tool_choice",
) -> Structure:
    """Give the form of an answer that is one tool call, or `several`, and nothing else.

    `is_opened`: of what follows the first text of a call's opening, which the model wrote of its
    own accord, perhaps in one token with the line break behind it.

    `tools` maps each name to the JSON Schema of its arguments. `special_id` gives the token of a
    text that is a special token of the model's, which is then written as that token.
    """

    def literals(texts: tuple[str, ...]) -> str:
        ids = {text: special_id(text) for text in texts}
        return " ".join(
            json.dumps(text) if ids[text] is None else f"<[{ids[text]}]>" for text in texts
        )

    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                form.arguments_field: dict(schema) or {"type": "object"},
            },
            "required": ["name", form.arguments_field],
            "additionalProperties": False,
        }
        for name, schema in tools.items()
    ]
    options = [f"call_{index}: %json {json.dumps(call)}" for index, call in enumerate(calls)]
    any_call = " | ".join(f"call_{index}" for index in range(len(calls)))
    start = "start: first" if is_opened else "start: call"
    if several and form.separator is not None:
        start += f" ({json.dumps(form.separator)} call){{0,{MAX_FORCED_CALLS - 1}}}"
    whole = f"call: {literals(form.opening)} ({any_call}) {literals(form.closing)}"
    lines = [start, whole, *options]
    if is_opened:
        rest = literals(tuple(text for text in form.opening[1:] if text.strip()))
        lines.append(f"first: {rest} /[ \\n]?/ ({any_call}) {literals(form.closing)}")
    return Structure("grammar", "\n".join(lines), param)
