"""Write what docs/ says of the code from the code itself: run by `make docs`.

A page is generated whole, or has generated sections between marks and text by hand around them.
A test compares each page with what this gives, so none can be out of date.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / ".import"))

import click  # noqa: E402

from treadle import cli  # noqa: E402
from treadle.ir import builder, dims, knobs, pipeline, types  # noqa: E402
from treadle.ir.cost import op_cost  # noqa: E402
from treadle.ir.graph import Graph, Op  # noqa: E402
from treadle.ir.ops.definition import OpDef  # noqa: E402
from treadle.ir.ops.registry import REGISTRY  # noqa: E402
from treadle.ir.text import print_op  # noqa: E402
from treadle.kernels import emit  # noqa: E402
from treadle.kernels.lower.by_kind import lower  # noqa: E402
from treadle.kernels.lower.candidates import Situation  # noqa: E402
from treadle.kernels.schedule.linears import GEMV_ROWS  # noqa: E402
from treadle.models import registry  # noqa: E402
from treadle.models.config import ModelConfig, from_hf  # noqa: E402
from treadle.models.defaults import DEFAULTS  # noqa: E402
from treadle.runtime import answer_formats, call_formats, pipeline_config  # noqa: E402
from treadle.runtime.compiler import FORMS  # noqa: E402
from treadle.runtime.engine import EngineStats  # noqa: E402
from treadle.runtime.plan import RESAMPLE  # noqa: E402
from treadle.server import (  # noqa: E402
    app,
    errors,
    messages_request,
    metrics,
    responses_request,
    schema,
)

NOTICE = "<!-- Written by `make docs` from the code; changes here are lost. -->"
BEGIN, END = "<!-- begin {}: written by `make docs` -->", "<!-- end {} -->"


def cli_page() -> str:
    """Describe every command with its options and examples, and the environment variables."""
    lines = [NOTICE, "", "# The command line", ""]
    lines += _paragraphs(cli.group.help or "")
    lines += ["| command | what it does |", "|---|---|"]
    for name, command in sorted(cli.group.commands.items()):
        lines.append(f"| [`{name}`](#{name}) | {command.get_short_help_str(limit=100)} |")
    lines += ["", cli.group.epilog or "", ""]
    # A context of the group's, because a command keeps the help option of its first context.
    parent = cli.group.make_context("treadle", [], resilient_parsing=True)
    for name, command in sorted(cli.group.commands.items()):
        context = click.Context(command, info_name=name, parent=parent)
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [f"## {name}", "", f"    treadle {name} {usage}", ""]
        lines += _paragraphs(command.help or "")
        lines += ["| option | what it does |", "|---|---|"]
        lines += [
            _option_row(option) for option in command.params if isinstance(option, click.Option)
        ]
        lines.append("")
    lines += ["## Environment variables", "", "| variable | meaning |", "|---|---|"]
    lines += [f"| `{knob.variable}` | {_cell(knob.doc)} |" for knob in knobs.ALL]
    return "\n".join(lines) + "\n"


def _paragraphs(text: str) -> list[str]:
    """Turn a help text into markdown; what click must not wrap (after `\\b`) becomes code."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if not paragraph.startswith("\b\n"):
            lines += [paragraph.replace("*", "\\*"), ""]
            continue
        code = paragraph.removeprefix("\b\n").splitlines()
        if code[0] == "Examples:":
            lines += ["Examples:", ""]
            code = code[1:]
        lines += ["```", *textwrap.dedent("\n".join(code)).splitlines(), "```", ""]
    return lines


def _option_row(option: click.Option) -> str:
    names = " / ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if isinstance(option.type, click.Choice):
        value = " " + " \\| ".join(f"`{choice}`" for choice in option.type.choices)
    elif option.is_flag:
        value = ""
    else:
        value = f" {option.metavar or option.type.name.upper()}"
    text = option.help or ""
    if option.show_default and option.default is not None:
        text += f" Default: {option.default}."
    return f"| {names}{value} | {_cell(text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(header: str, rows: Iterable[Iterable[str]]) -> list[str]:
    """Write a table; `header` has its columns with bars between them."""
    lines = [f"| {header} |", "|" + "---|" * (header.count("|") + 1)]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


# --- the model that costs and kernels are shown for ----------------------------------------------

# Llama 3.1 8B, one layer of it: the other layers are the same.
EXAMPLE: dict[str, object] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "first_k_dense_replace": 0,  # a mixture of experts has some in its one layer
}
# What the example must say otherwise for an architecture.
OWN: dict[str, dict[str, object]] = {
    "DeepseekV2ForCausalLM": {"num_key_value_heads": 32, "num_experts_per_tok": 6},
    "DeepseekV3ForCausalLM": {"num_key_value_heads": 32},
}
# (form of graph, largest dims of its buckets)
BUCKETS: tuple[tuple[str, int], ...] = (
    ("decode.few", 1),
    ("decode.few", GEMV_ROWS),
    ("decode", 32),
    ("decode", 256),
    ("mixed", 16),
    ("mixed", 256),
    ("mixed", 8192),
)
PLACES = (("interpret", ""), ("cuda", "sm_80"), ("cuda", "sm_90"))


@functools.cache
def example_config(architecture: str) -> ModelConfig:
    """Give the example's sizes as a config of this architecture."""
    return from_hf(EXAMPLE | OWN.get(architecture, {}) | {"architectures": [architecture]})


@functools.cache
def authored_graph(architecture: str, step: str) -> Graph:
    """Build the example's graph as its spec says."""
    config = example_config(architecture)
    return registry.build_graph(config, step=step, dtype="bf16", page_size=64)


@functools.cache
def fused_graph(architecture: str, name: str) -> Graph:
    """Build the example's graph in a form."""
    form = FORMS[name]
    authored = authored_graph(architecture, form.step)
    return pipeline.run_passes(authored, few_tokens=form.few_tokens, joined=form.joined)[0]


@functools.cache
def kernels() -> dict[str, tuple[tuple[str, ...], frozenset[str]]]:
    """Find the kernels of every model family: name -> (kinds of the ops inside, templates).

    Each family is fused and lowered for every kind of bucket, target and GPU.
    """
    found: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {}
    for family in registry.FAMILIES:
        for form, rows in (*BUCKETS, (RESAMPLE, 256)):
            if form == RESAMPLE:
                step, graph = form, builder.build_resample(form, int(str(EXAMPLE["vocab_size"])))
            else:
                step, graph = FORMS[form].step, fused_graph(family.architectures[0], form)
            sizes = {"T": rows, "B": min(rows, 256), "R": 256, "M": 128, "P": 512, "C": 8192}
            for target, architecture in PLACES:
                where = Situation(sizes, step, target, architecture)
                for op in graph.ops:
                    kinds = tuple(inner.kind for inner in op.body or (op,))
                    for candidate in lower(op, graph, where):
                        before = found.get(candidate.name, ((), frozenset()))[1]
                        found[candidate.name] = (kinds, before | {candidate.template})
    return found


def kernels_of(kind: str) -> dict[str, frozenset[str]]:
    """Give the kernels that an op of this kind becomes part of, with their templates."""
    return {name: stems for name, (kinds, stems) in kernels().items() if kind in kinds}


# The builder's method for each op that an author writes.
AUTHORED: dict[str, Callable[..., Any] | None] = {
    **{kind: getattr(builder.GraphBuilder, kind, None) for kind in REGISTRY},
    "latent_write": builder.GraphBuilder.append_latent,
    "gather_rows": builder.GraphBuilder.last_rows,
    "sample": builder.GraphBuilder.finish,
}


# --- ir.md ----------------------------------------------------------------------------------------


class Amount:
    """A sum of products of symbolic dims, so that the registry's formulas give a formula."""

    def __init__(self, terms: Mapping[tuple[str, ...], int]) -> None:
        self.terms = {symbols: factor for symbols, factor in terms.items() if factor}

    @classmethod
    def of(cls, value: Any) -> Amount:
        return value if isinstance(value, Amount) else cls({(): value})

    def __add__(self, other: Any) -> Amount:
        total = dict(self.terms)
        for symbols, factor in Amount.of(other).terms.items():
            total[symbols] = total.get(symbols, 0) + factor
        return Amount(total)

    def __mul__(self, other: Any) -> Amount:
        product: dict[tuple[str, ...], int] = {}
        for mine, factor in self.terms.items():
            for others, count in Amount.of(other).terms.items():
                symbols = tuple(sorted(mine + others))
                product[symbols] = product.get(symbols, 0) + factor * count
        return Amount(product)

    __radd__, __rmul__ = __add__, __mul__

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        return " + ".join(
            "·".join([*([f"{factor:,}"] if factor != 1 or not symbols else []), *symbols])
            for symbols, factor in sorted(self.terms.items(), key=lambda term: -len(term[0]))
        )


def symbols_section() -> list[str]:
    """List the symbolic dims."""
    rows = ((f"`{name}`", meaning) for name, meaning in dims.SYMBOLS.items())
    return table("symbol | meaning", rows)


def dtypes_section() -> list[str]:
    """List dtypes and layouts."""
    sizes = [(f"`{name}`", str(size)) for name, size in types.DTYPE_BYTES.items()]
    layouts = [(f"`{name}`" if name else "(none)", what) for name, what in types.LAYOUTS.items()]
    return [*table("dtype | bytes", sizes), "", *table("layout | meaning", layouts)]


def inputs_section() -> list[str]:
    """List the inputs that a graph has beside its caches."""
    rows = [("`seq_rows`", "`i32[B]`", "both")]
    rows += [(f"`{name}`", f"`{type_}`", "both") for name, type_ in builder.ROW_STATE.items()]
    rows += [(f"`{name}`", f"`{type_}`", "mixed") for name, type_ in builder.STEP_INPUTS.items()]
    return table("input | type | steps", rows)


def example_section() -> list[str]:
    """Print the attention half of a layer, authored and fused, as `show` prints it."""
    architecture = registry.FAMILIES[0].architectures[0]
    authored = authored_graph(architecture, "decode")
    fused = fused_graph(architecture, "decode.few")
    last = "layers.0.after_attention"
    lines = []
    for title, graph in (("As authored:", authored), ("Fused, for few tokens:", fused)):
        printed = [line for op in _until(graph, last) for line in print_op(op, graph)]
        lines += ["", title, "", "```text", *printed, "```"]
    return lines[1:]


def _until(graph: Graph, last: str) -> Iterator[Op]:
    """Yield the ops of the first layer up to the one that makes `last`."""
    for op in graph.ops:
        if op.name.startswith("layers.") or not op.outputs or last in op.outputs:
            yield op
        if last in op.outputs:
            return


def passes_section() -> list[str]:
    """List the passes in their order."""
    rows = []
    for number, pass_ in enumerate(pipeline.PASSES, start=1):
        when = "few tokens" if pass_.few_tokens_only else "always"
        if pass_.many_tokens_only:
            when = "many tokens"
        if pass_.joined_only:
            when = "joined attention"
        what = inspect.cleandoc(pass_.run.__doc__ or "").partition("\n")[0]
        rows.append((str(number), f"`{pass_.name}`", what, when, pass_.stage_after))
    return table("| pass | what it does | runs | stage after it", rows)


def ops_section() -> list[str]:
    """Describe every op of the registry."""
    rows = [
        (f"[`{kind}`](#{kind})", one.role, _doc_parts(one.doc)[0]) for kind, one in REGISTRY.items()
    ]
    lines = table("op | role | what it does", rows)
    for kind, definition in REGISTRY.items():
        lines += ["", f"### {kind}", "", *_op_lines(definition)]
    return lines


def _op_lines(definition: OpDef) -> list[str]:
    first, notes = _doc_parts(definition.doc)
    operands = ", ".join(f"`{name}`" for name in definition.operands)
    results = ", ".join(f"`{name}`" for name in definition.results) or "none"
    rows = [("operands", operands), ("results", results)]
    if definition.mutates:
        rows.append(("writes in place", ", ".join(f"`{name}`" for name in definition.mutates)))
    rows.append(("parameters", _parameters(definition.params)))
    method = AUTHORED[definition.kind]
    rows.append(("the author writes", f"`{_call(method)}`" if method else "nothing: `b` adds it"))
    rows += [(name.lower(), _prose(note)) for name, note in notes.items()]
    rows += _cost_rows(definition.kind)
    rows.append(("role", definition.role + "; takes any rows" * definition.any_rows))
    covered = [
        f"`{name}` ({', '.join(sorted(stems))})"
        for name, stems in sorted(kernels_of(definition.kind).items())
    ]
    rows.append(("kernels (templates)", "; ".join(covered)))
    return [first, "", *table("|", ((name, _cell(text)) for name, text in rows))]


def _prose(note: str) -> str:
    """Write a note of a docstring: formulas as code, stars of the rest as stars."""
    return f"`{note}`" if " = " in note.partition(";")[0] else note.replace("*", "\\*")


def _parameters(params: type) -> str:
    """Write a parameter class: its fields, and what its docstring says of them."""
    found = [
        f"`{field.name}: {field.type}"
        + ("" if field.default is MISSING else f" = {field.default!r}")
        + "`"
        for field in fields(params)
    ]
    if not found:
        return "none"
    return f"{', '.join(found)}. {' '.join((params.__doc__ or '').split())}"


def _call(method: Callable[..., Any]) -> str:
    """Write how an author calls a method of the builder, without annotations."""
    parts: list[str] = []
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        has_star = any(part.startswith("*") for part in parts)
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            parts.append("*")
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parts.append(f"{star}{parameter.name}{default}")
    return f"b.{method.__name__}({', '.join(parts)})"


def _doc_parts(doc: str) -> tuple[str, dict[str, str]]:
    """Cut a docstring into its first sentence and its notes (`Formula`, `Shapes`, …)."""
    lines = inspect.cleandoc(doc).splitlines()
    notes: dict[str, str] = {}
    name = ""
    for line in lines[1:]:
        found = re.match(r"([A-Z][a-z]+): (.*)", line)
        if found:
            name = found[1]
            notes[name] = found[2]
        elif line.strip():
            notes[name] = f"{notes[name]} {line.strip()}"
    return lines[0], notes


def _cost_rows(kind: str) -> list[tuple[str, str]]:
    """Give an op's cost in the example, as the registry's own formulas count it."""
    sizes: Any = {name: Amount({(name,): 1}) for name in dims.SYMBOLS}
    for step in ("decode", "mixed"):
        graph = authored_graph(registry.FAMILIES[0].architectures[0], step)
        op = next((op for op in graph.ops if op.kind == kind), None)
        if op is None:
            continue
        cost = op_cost(op, graph, sizes)
        shown = ", ".join(f"{name} {graph.type_of(name)}" for name in _tensors(op))
        rows = [("example", f"`{shown}`")] if shown else []
        return [
            *rows,
            ("operations there", str(Amount.of(cost.flops))),
            ("bytes there", str(Amount.of(cost.bytes))),
        ]
    return []


def _tensors(op: Op) -> list[str]:
    """The operands that say how large the op is: not the step's and rows' own."""
    skipped = {*builder.ROW_STATE, *builder.STEP_INPUTS, "seq_rows"}
    return [
        name
        for name in (*op.inputs, *op.outputs)
        if name not in skipped and not name.startswith("advance.")
    ]


# --- kernels.md -----------------------------------------------------------------------------------


def templates_section() -> list[str]:
    """List the templates."""
    used = {stem for _, stems in kernels().values() for stem in stems}
    rows = []
    for stem in emit.template_names():
        template = emit.read_template(stem)
        text = "\n".join(template.lines)
        first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        hooks = ", ".join(f"`{name}`" for name in sorted(template.hooks)) or "none"
        facts = ", ".join(f"`{name}`" for name, _ in template.schedule_facts)
        chosen = "yes" if stem in used else "not yet"
        link = f"[`{stem}`](../kernels/templates/{stem}.py)"
        rows.append((link, _cell(first), hooks, facts, chosen))
    return table("template | what it computes | hooks | schedule | chosen by lowering", rows)


def kernels_section() -> list[str]:
    """List the kernels that models become."""
    rows = []
    for name, (kinds, stems) in sorted(kernels().items()):
        rows.append(
            (
                f"`{name}`",
                " → ".join(kinds),
                ", ".join(f"`{stem}`" for stem in sorted(stems)),
            )
        )
    return table("kernel | ops inside, in order | templates", rows)


# --- models.md ------------------------------------------------------------------------------------


def families_section() -> list[str]:
    """List the families of the registry."""
    first = _authored_kinds(registry.FAMILIES[0])
    rows = []
    for family in registry.FAMILIES:
        path = DOCS.parent / f"models/{family.name}.py"
        text = path.read_text(encoding="utf-8")
        what = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        beyond = sorted(_authored_kinds(family) - first)
        remarks = [
            f"{name.removesuffix('ForCausalLM')}: {entry.remark}"
            for name in family.architectures
            if (entry := DEFAULTS.get(name)) and entry.remark
        ]
        rows.append(
            (
                f"[`{family.name}`](../models/{family.name}.py)",
                ", ".join(f"`{name}`" for name in family.architectures),
                str(len(text.splitlines())),
                ", ".join(f"[`{kind}`](ir.md#{kind})" for kind in beyond) or "none",
                _cell("; ".join([what.removesuffix("."), *remarks])),
            )
        )
    header = "family | architectures | lines of its spec | ops beyond Llama's | remarks"
    return table(header, rows)


def verified_section() -> list[str]:
    """Say what all families are verified against, and what they run on and in."""
    pins = (DOCS.parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pin,) = (line for line in pins if line.startswith("transformers=="))
    rows = [
        ("verified against", f"transformers {pin.partition('==')[2]}, eager, in float32"),
        ("targets", "`reference` and `interpret` in every family's tests; `cuda` from one source"),
        (
            "KV cache",
            "the model's dtype: bf16, fp16 or fp32; [int8, int4 and fp8](kv-cache.md) where "
            "attention is not to latents",
        ),
        (
            "quantised weights",
            "none are computed with; those of GGUF files and in MXFP4 are widened when loaded",
        ),
    ]
    return table("of every family | ", rows)


def _authored_kinds(family: registry.Family) -> set[str]:
    """Give the kinds of the ops that a family's specs are written in."""
    return {
        op.kind
        for architecture in family.architectures
        for step in builder.STEP_KINDS
        for op in authored_graph(architecture, step).ops
    }


# --- serving.md -----------------------------------------------------------------------------------

Row = tuple[str, str, str, str]


def _field_rows() -> Iterator[tuple[str, list[Row]]]:
    """Give the request fields, grouped: shared, of each endpoint, without effect."""
    chat = {row[0]: row for row in schema.describe(schema.ChatRequest)}
    completion = {row[0]: row for row in schema.describe(schema.CompletionRequest)}
    declared = {field.name for field in fields(schema.GenerateRequest)}
    yield "shared", [row for name, row in chat.items() if name in declared]
    for name, rows, kind in (
        ("chat", chat, schema.ChatRequest),
        ("completions", completion, schema.CompletionRequest),
    ):
        own = {field.name for field in fields(kind)} - declared
        yield name, [row for field, row in rows.items() if field in own]
    yield "without effect", [chat[name] for name in schema.WITHOUT_EFFECT]


def fields_section(group: str) -> list[str]:
    """List the supported fields of a group of requests."""
    rows = dict(_field_rows())[group]
    return table(
        "field | accepts | default | meaning",
        (
            (f"`{name}`", _cell(accepts), f"`{default}`", _cell(doc))
            for name, accepts, default, doc in rows
        ),
    )


def tokenize_section() -> list[str]:
    """List the fields of the tokenizer's requests."""
    kinds = {"/tokenize": schema.TokenizeRequest, "/detokenize": schema.DetokenizeRequest}
    rows = (
        (endpoint, f"`{name}`", _cell(accepts), f"`{default}`", _cell(doc))
        for endpoint, kind in kinds.items()
        for name, accepts, default, doc in schema.describe(kind)
    )
    return table("endpoint | field | accepts | default | meaning", rows)


def embedding_section() -> list[str]:
    """List the fields of OpenAI's embeddings."""
    rows = (
        (f"`{name}`", _cell(accepts), f"`{default}`", _cell(doc))
        for name, accepts, default, doc in schema.describe(schema.EmbeddingRequest)
    )
    return table("field | accepts | default | meaning", rows)


def messages_section() -> list[str]:
    """List the fields of Anthropic's messages."""
    kind = messages_request.MessagesRequest
    counted = {field.name for field in fields(messages_request.CountTokensRequest)}
    both = {True: "both", False: "messages"}
    rows = (
        (f"`{name}`", _cell(accepts), f"`{default}`", both[name in counted], _cell(doc))
        for name, accepts, default, doc in schema.describe(kind)
    )
    return table("field | accepts | default | endpoint | meaning", rows)


def responses_section() -> list[str]:
    """List the fields of OpenAI's responses."""
    rows = (
        (f"`{name}`", _cell(accepts), f"`{default}`", _cell(doc))
        for name, accepts, default, doc in schema.describe(responses_request.ResponsesRequest)
    )
    return table("field | accepts | default | meaning", rows)


def parsers_section() -> list[str]:
    """List the forms of tool calls and of reasoning."""
    rows = [
        ("tool calls", f"`{one.name}`", f"`{_cell(one.example)}`")
        for one in call_formats.CALL_FORMATS
    ]
    rows += [
        ("reasoning", f"`{one.name}`", f"`{one.opening}`...`{one.closing}`")
        for one in answer_formats.REASONING_FORMATS
    ]
    both = "`<|channel|>analysis<|message|>`..., `to=functions.NAME`"
    rows.append(("both", f"`{answer_formats.HARMONY}`", _cell(both)))
    return table("what | name | form", rows)


def unsupported_section() -> list[str]:
    """List the fields that are refused by name unless they ask for nothing."""
    endpoints = {schema.ChatRequest: "chat", schema.CompletionRequest: "completions"}
    where: dict[tuple[str, str], list[str]] = {}
    for kind, refused in schema.UNSUPPORTED.items():
        for name, check in refused.items():
            where.setdefault((name, check.expects), []).append(endpoints[kind])
    rows = (
        (f"`{name}`", ", ".join(found), f"`{accepts}`") for (name, accepts), found in where.items()
    )
    return table("field | endpoint | accepted values, which change nothing", rows)


# What each code of an error means to the client. A code of the source that lacks a line fails here.
CODES: dict[str, str] = {
    "body_too_large": "the body is larger than `--max-body`",
    "chat_template_error": "the model's chat template refuses the messages; its own words follow",
    "context_length_exceeded": "prompt, or prompt and `max_tokens`, don't fit the window",
    "draining": "the server is shutting down; send it elsewhere, or again later",
    "duplicate_request_id": "an id that is running already",
    "empty": "a prompt that holds nothing",
    "empty_prompt": "a prompt that holds nothing",
    "engine_error": "the engine failed at this request",
    "internal_error": "a fault of the server; its log has the details",
    "invalid_api_key": "no key, or another one",
    "invalid_body": "the body can't be read: broken chunks or compression",
    "invalid_json": "no strict JSON: syntax, NaN, or a field given twice",
    "invalid_max_tokens": "`max_tokens` below 1",
    "invalid_request_id": "an `X-Request-Id` of more than 200 characters, or not printable ASCII",
    "invalid_text": "text that is not Unicode: half of a surrogate pair",
    "invalid_token_id": "a token id outside the vocabulary",
    "invalid_type": "a value of another JSON type",
    "invalid_value": "a value out of range, or one that contradicts another field",
    "kv_cache_exceeded": "a request that the whole KV cache could not hold",
    "loading": "the model is not loaded yet",
    "method_not_allowed": "this route has other methods; the header `Allow` lists them",
    "missing_field": "a required field is absent or null",
    "model_not_found": "another model's name; the message gives the one that is served",
    "no_chat_template": "the model has no chat template: use /v1/completions",
    "response_not_found": "a stored response that is not there, or not any more",
    "read_timeout": "the request's body did not come in time (`--read-timeout-s`)",
    "sleeping": "the server sleeps; /wakeup loads the model again",
    "unsupported_endpoint": "a route that clients know, and that is not offered here",
    "aborted": "/abort_request ended the answer",
    "not_found": "there is no such route",
    "overloaded": "too many requests wait (`--max-waiting`); retry later",
    "reserved_name": "`chat_template_kwargs` names something that is not the request's to set",
    "unknown_field": "a field that is not OpenAI's or ours; the nearest name is suggested",
    "unsupported_field": "a field that is known and not offered yet, with a value that matters",
    "unsupported_media_type": "another `Content-Type` than `application/json` in UTF-8",
    "unsupported_structure": "a schema, regex or grammar that can't be enforced",
    "unsupported_part": "a message part that is not text",
}


def source_codes() -> set[str]:
    """Find the codes that errors are raised with, in the source."""
    root = DOCS.parent
    found = set(errors.STATUS_OF_CODE) | set(errors.CODE_OF_HTTP_STATUS.values())
    for path in [*(root / "server").glob("*.py"), *(root / "runtime").glob("*.py")]:
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r'code(?:: str)? ?= ?"([a-z_]+)"', text))
        found |= set(re.findall(r'"((?:invalid|unsupported)_[a-z]+)"\)', text))
        found |= set(re.findall(r'message, code = .+, "([a-z_]+)"$', text, re.MULTILINE))
    return found


def errors_section() -> list[str]:
    """List status and meaning of every error code."""
    unknown = source_codes() ^ set(CODES)
    if unknown:
        raise SystemExit(
            f"docs/build_reference.py: CODES and the source differ: {', '.join(sorted(unknown))}"
        )
    status_500 = {"engine_error", "internal_error"}
    rows = []
    for code, meaning in CODES.items():
        status = 500 if code in status_500 else errors.STATUS_OF_CODE.get(code, 400)
        kind = errors.TYPE_OF_STATUS.get(status, "invalid_request_error")
        rows.append((status, code, kind, meaning))
    return table(
        "status | code | type | meaning",
        (
            (str(status), f"`{code}`", f"`{kind}`", meaning)
            for status, code, kind, meaning in sorted(rows)
        ),
    )


class _NoEngine:
    """Stands for an engine whose counters are all zero."""

    ready = False

    def stats(self) -> EngineStats:
        return EngineStats()

    def __getattr__(self, name: str) -> int:
        return 0


def endpoints_section() -> list[str]:
    """List the routes with the first line of what answers them."""
    rows = []
    for route in app.build_app(_NoEngine()).router.routes():  # type: ignore[arg-type]
        if route.method != "HEAD" and route.resource is not None:
            what = inspect.cleandoc(route.handler.__doc__ or "").partition("\n")[0]
            rows.append((f"`{route.method} {route.resource.canonical}`", _cell(what)))
    return table("route | what it does", rows)


def metrics_section() -> list[str]:
    """List the metrics."""
    collected = metrics.Metrics(_NoEngine()).registry.collect()  # type: ignore[arg-type]
    rows = []
    for metric in collected:
        name = metric.name + ("_total" if metric.type == "counter" else "")
        rows.append((f"`{name}`", metric.type, _cell(metric.documentation)))
    return table("metric | type | meaning", rows)


# --- pipeline.md ----------------------------------------------------------------------------------


def generation_section() -> list[str]:
    """List the fields of the pipeline's sampling, with what the class says of them."""
    config = pipeline_config.GenerationConfig
    rows = [
        (f"`{own.name}`", f"`{own.default!r}`", "so far" if own.metadata else "")
        for own in fields(config)
    ]
    return [_class_prose(config), "", *table("field | default | only its default", rows)]


def engine_settings_section() -> list[str]:
    """List the pipeline's settings with the names that LMDeploy has for them."""
    config = pipeline_config.EngineConfig
    theirs: dict[str, list[str]] = {}
    for alias, own in pipeline_config.ALIASES.items():
        theirs.setdefault(own, []).append(f"`{alias}`")
    rows = [
        (f"`{own.name}`", f"`{own.default!r}`", ", ".join(theirs.get(own.name, [])))
        for own in fields(config)
    ]
    fixed = ", ".join(f"`{name}={value!r}`" for name, value in pipeline_config.FIXED.items())
    return [
        _class_prose(config),
        "",
        *table("setting | default | LMDeploy's name", rows),
        "",
        f"Accepted with this value only: {fixed}.",
    ]


def _class_prose(one: type) -> str:
    """Give a class's docstring without its first sentence's paragraph and its errors."""
    text = inspect.cleandoc(one.__doc__ or "").partition("\n\n")[2]
    return text.partition("\nRaises:")[0].replace("see `ALIASES`", "see the table")


# --- pages ----------------------------------------------------------------------------------------


SECTIONS: dict[str, dict[str, Callable[[], list[str]]]] = {
    "ir.md": {
        "symbols": symbols_section,
        "dtypes": dtypes_section,
        "inputs": inputs_section,
        "example": example_section,
        "passes": passes_section,
        "ops": ops_section,
    },
    "models.md": {"families": families_section, "verified": verified_section},
    "kernels.md": {"templates": templates_section, "kernels": kernels_section},
    "serving.md": {
        "shared fields": functools.partial(fields_section, "shared"),
        "chat fields": functools.partial(fields_section, "chat"),
        "completion fields": functools.partial(fields_section, "completions"),
        "fields without effect": functools.partial(fields_section, "without effect"),
        "unsupported fields": unsupported_section,
        "tokenize fields": tokenize_section,
        "embedding fields": embedding_section,
        "parsers": parsers_section,
        "messages fields": messages_section,
        "responses fields": responses_section,
        "errors": errors_section,
        "metrics": metrics_section,
        "endpoints": endpoints_section,
    },
    "pipeline.md": {
        "generation fields": generation_section,
        "engine settings": engine_settings_section,
    },
}


def filled_page(name: str) -> str:
    """Give a page with its generated sections written anew."""
    text = (DOCS / name).read_text(encoding="utf-8")
    for section, build in SECTIONS[name].items():
        begin, end = BEGIN.format(section), END.format(section)
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found_begin or not found_end:
            raise SystemExit(f"docs/{name}: expected the marks of the section `{section}`.")
        text = before + "\n".join([begin, "", *build(), "", end]) + after
    return text


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli_page,
    **{name: functools.partial(filled_page, name) for name in SECTIONS},
}


def main() -> None:
    """Write every page whose text has changed."""
    for name, build in PAGES.items():
        page, text = DOCS / name, build()
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8", newline="\n")
            print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
