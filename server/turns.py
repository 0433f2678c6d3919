"""One turn of a conversation, whatever protocol asked: its prompt, tools, and answer's form.

Must not know protocols: each reads its own request into this, and writes the answer's parts down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from treadle.ir.errors import RequestError
from treadle.runtime.answer_formats import AnswerFormat, find_format
from treadle.runtime.forced_calls import CALL_FORMS, CallForm, force_calls
from treadle.runtime.request import SamplingParams, fit_to_window
from treadle.runtime.tokenizer import Tokenizer
from treadle.server.answers import Work
from treadle.server.conversation import AUTO, ToolChoice
from treadle.server.prompts import ChatPrompt, encode_chat, prepare_params
from treadle.server.state import ENGINE, OPTIONS


@dataclass(frozen=True)
class Turn:
    """Hold what is asked for. `tools` are as OpenAI writes them: {"type": "function", ...}.

    The names of the protocol's fields are for errors.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    messages_param: str = "messages"
    max_tokens_param: str = "max_tokens"
    effort_param: str = "reasoning_effort"

    @property
    def forces_call(self) -> bool:
        """Say whether the answer must be a tool call."""
        return self.tool_choice.mode in ("required", "named")

    @property
    def offers_tools(self) -> bool:
        """Say whether the model is told of tools."""
        return bool(self.tools) and self.tool_choice.mode != "none"

    @property
    def has_strict_tools(self) -> bool:
        """Say whether calls must have their declared form wherever the model makes one."""
        return self.offers_tools and any(tool["function"].get("strict") for tool in self.tools)


def answer_format(app: web.Application) -> AnswerFormat:
    """Give how the served model's answers are told apart."""
    options = app[OPTIONS]
    template = app[ENGINE].tokenizer.chat_template
    return find_format(template, options.tool_parser, options.reasoning_parser)


async def prepare(app: web.Application, turn: Turn) -> Work:
    """Render a turn and give what to submit for it.

    Raises: RequestError: its prompt does not fit, its tools can't be offered, or the template
    refuses it.
    """
    engine, format_ = app[ENGINE], answer_format(app)
    prompt = await asyncio.to_thread(render, app, turn)
    offers_tools = turn.offers_tools
    shown = engine.tokenizer.special_ids(format_.tokens(with_calls=offers_tools))
    wanted = _add_form(turn, format_, prompt.text, engine.tokenizer)
    params = fit_to_window(
        replace(await prepare_params(engine, wanted), shown_token_ids=shown),
        len(prompt.token_ids),
        engine.max_model_len,
        prompt_param=turn.messages_param,
        max_tokens_param=turn.max_tokens_param,
    )
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in turn.tools
    }
    tools = schemas if offers_tools else None
    return Work(
        prompt.token_ids,
        params,
        make_parser=lambda: format_.parser(prompt.text, tools),
        one_call=offers_tools and not turn.parallel_tool_calls,
    )


def render(app: web.Application, turn: Turn) -> ChatPrompt:
    """Give a turn's prompt; takes time, so call it in a thread. Raises: RequestError."""
    engine = app[ENGINE]
    template = engine.tokenizer.chat_template
    if turn.offers_tools:
        _check_tools(turn, template, answer_format(app))
    return encode_chat(
        engine,
        turn.messages,
        tools=[_for_template(tool) for tool in turn.tools] if turn.offers_tools else None,
        add_generation_prompt=turn.add_generation_prompt,
        continue_final_message=turn.continue_final_message,
        template_kwargs={**_effort_switches(turn, template), **turn.template_kwargs},
        param=turn.messages_param,
    )


def _for_template(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Give a tool as models were trained to see it."""
    function = {name: one for name, one in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


def _check_tools(turn: Turn, template: str, format_: AnswerFormat) -> None:
    """Refuse tools that the model would not hear of, or whose calls could not be read."""
    if "tools" not in template:
        raise RequestError(
            "The model's chat template has no place for `tools`, so it would never hear of them.",
            remedy="Leave `tools` out, or serve a model that was trained to call tools.",
            param="tools",
            code="unsupported_field",
        )
    if not format_.has_calls:
        raise RequestError(
            "The model's chat template doesn't show in which form it writes tool calls, so `tools` "
            "can't be offered.",
            remedy="The server's option --tool-parser names a form.",
            param="tools",
            code="unsupported_field",
        )
    form = _call_form(format_)
    if turn.has_strict_tools and not turn.forces_call and (form is None or not form.opening):
        marked = ", ".join(name for name, one in CALL_FORMS.items() if one.opening)
        raise RequestError(
            "A `strict` tool that may or may not be called is supported for models that mark the "
            f"beginning of a call and write it as JSON ({marked}), and this one does not.",
            remedy="Leave `strict` out, or force the call by `tool_choice`.",
            param="tools",
            code="unsupported_field",
        )
    if turn.forces_call and form is None:
        raise RequestError(
            "A `tool_choice` that forces a call is supported for models that write calls as JSON "
            f"({', '.join(CALL_FORMS)}), and this one does not: expected 'auto' or 'none'.",
            remedy="Leave it out, and say in the prompt that a tool must be used.",
            param="tool_choice",
            code="unsupported_field",
        )


def _call_form(format_: AnswerFormat) -> CallForm | None:
    return None if format_.calls is None else CALL_FORMS.get(format_.calls.name)


def _add_form(
    turn: Turn, format_: AnswerFormat, prompt: str, tokenizer: Tokenizer
) -> SamplingParams:
    """Give the turn's parameters with the form that its answer must have.

    Where the prompt has opened the reasoning, the form begins after it; that of a strict tool's
    call, where the model begins one.
    Raises: RequestError: the answer would need two forms.
    """
    params = turn.params
    if turn.forces_call or turn.has_strict_tools:
        if params.structure is not None:
            raise RequestError(
                "Expected either a form of the answer, or a `tool_choice` that forces a call or "
                "`strict` tools; found both.",
                param="tool_choice" if turn.forces_call else "tools",
                code="invalid_value",
            )
        form = _call_form(format_)
        assert form is not None, "`render` refuses the others"
        functions = [tool["function"] for tool in turn.tools]
        if turn.tool_choice.mode == "named":
            functions = [one for one in functions if one["name"] == turn.tool_choice.name]
        chosen = {
            one["name"]: (one.get("parameters") or {})
            if turn.forces_call or one.get("strict")
            else {}
            for one in functions
        }

        def special_id(text: str) -> int | None:
            return next(iter(tokenizer.special_ids([text])), None)

        several = turn.parallel_tool_calls and turn.tool_choice.mode != "named"
        if not turn.forces_call:
            structure = force_calls(
                form, chosen, special_id, several=several, is_opened=True, param="tools"
            )
            return replace(params, structure=structure, structure_after=form.opening[0])
        structure = force_calls(form, chosen, special_id, several=several)
        params = replace(params, structure=structure)
    if params.structure is None:
        return params
    if format_.is_harmony:
        return replace(params, structure_after="<|channel|>final<|message|>")
    reasoning = format_.reasoning
    if reasoning is not None and prompt.rstrip().endswith(reasoning.opening):
        return replace(params, structure_after=reasoning.closing)
    return params


def _effort_switches(turn: Turn, template: str) -> dict[str, Any]:
    """Give a wish for more or less reasoning to the template, by the switches that it has."""
    effort = turn.reasoning_effort
    if effort is None:
        return {}
    switches: dict[str, Any] = {}
    if "reasoning_effort" in template and effort != "none":
        switches["reasoning_effort"] = effort
    if "enable_thinking" in template:
        switches["enable_thinking"] = effort != "none"
    if not switches:
        raise RequestError(
            f"`{turn.effort_param}` is not supported by this model: its chat template has no "
            "switch for reasoning.",
            remedy="Leave it out.",
            param=turn.effort_param,
            code="unsupported_field",
        )
    return switches
