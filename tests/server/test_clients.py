"""Clients that people use, against a live server: `make test-clients` runs these.

LiteLLM, LangChain and lm-eval bring seventy packages with them, so they have an environment of
their own; without it these tests are skipped. The clients of OpenAI and Anthropic are used all over
the other tests.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_dice, make_random

from . import tiny
from .fake_engine import FakeEngine, say
from .live import LiveServer
from .test_tools import CALL, TEMPLATE, TOOL

pytestmark = pytest.mark.slow
REASON = "not installed; `make test-clients` installs it"
ASK = [{"role": "user", "content": "hi"}]
# Shares of the four faces that fixture D draws.
SHARES = {"A": 0.4, "B": 0.3, "C": 0.2, "D": 0.1}


@pytest.fixture(scope="module", autouse=True)
def no_network() -> Any:
    """Keep the clients from asking any hub; each reads these when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "LITELLM_LOCAL_MODEL_COST_MAP"):
            patch.setenv(name, "True")
        patch.setenv("OPENAI_API_KEY", "EMPTY")
        yield


@pytest.fixture(scope="module")
def server(start_server: Any, tmp_path_factory: pytest.TempPathFactory, eos: int) -> LiveServer:
    folder = tiny.save_byte_level(tmp_path_factory.mktemp("clients"), template=TEMPLATE)
    text = f"<think>Hm.</think>I look.\n{CALL}"
    return start_server(lambda: FakeEngine(folder, say(text, then=eos), max_model_len=2048))


@pytest.fixture(scope="module")
def dice_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dice(tmp_path_factory.mktemp("dice")).path


@pytest.fixture(scope="module")
def dice(start_model: Any, dice_folder: Path) -> LiveServer:
    return start_model(dice_folder)


# --- LiteLLM --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_reads_text_reasoning_and_calls(server: LiveServer, stream: bool) -> None:
    litellm = pytest.importorskip("litellm", reason=REASON)
    answer = litellm.completion(
        model="hosted_vllm/tiny",
        api_base=f"{server.url}/v1",
        api_key="EMPTY",
        messages=ASK,
        tools=[TOOL],
        stream=stream,
    )
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    message = answer.choices[0].message
    assert message.content == "I look."
    assert message.reasoning_content == "Hm."
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_w", '{"city": "Bern"}')
    assert answer.choices[0].finish_reason == "tool_calls"


def test_litellm_reads_the_usage_of_a_stream(server: LiveServer) -> None:
    litellm = pytest.importorskip("litellm", reason=REASON)
    options = {"model": "hosted_vllm/tiny", "api_base": f"{server.url}/v1", "api_key": "EMPTY"}
    whole = litellm.completion(messages=ASK, **options)
    chunks = litellm.completion(
        messages=ASK, stream=True, stream_options={"include_usage": True}, **options
    )
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usages[-1].completion_tokens == whole.usage.completion_tokens
    assert usages[-1].prompt_tokens == whole.usage.prompt_tokens


def test_litellm_tells_what_the_server_refused(server: LiveServer) -> None:
    litellm = pytest.importorskip("litellm", reason=REASON)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(
            model="hosted_vllm/tiny",
            api_base=f"{server.url}/v1",
            api_key="EMPTY",
            messages=ASK,
            temperature=9.0,
        )


def test_litellm_speaks_anthropics_protocol(server: LiveServer) -> None:
    litellm = pytest.importorskip("litellm", reason=REASON)
    answer = litellm.completion(
        model="anthropic/tiny",
        api_base=server.url,
        api_key="EMPTY",
        messages=ASK,
        tools=[TOOL],
        max_tokens=200,
    )
    message = answer.choices[0].message
    assert message.content == "I look."
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Bern"}


# --- LangChain ------------------------------------------------------------------------------------


def langchain_model(server: LiveServer, **options: Any) -> Any:
    langchain = pytest.importorskip("langchain_openai", reason=REASON)
    return langchain.ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0, **options
    )


def test_langchain_reads_calls_whole_and_streamed(server: LiveServer) -> None:
    model = langchain_model(server, stream_usage=True).bind_tools([TOOL])
    whole = model.invoke("hi")
    assert whole.content == "I look."
    assert whole.tool_calls[0]["args"] == {"city": "Bern"}
    total = None
    for chunk in model.stream("hi"):
        total = chunk if total is None else total + chunk
    assert total is not None and total.content == whole.content
    assert total.tool_calls[0]["args"] == {"city": "Bern"}
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def test_langchain_sends_the_results_of_calls_back(server: LiveServer) -> None:
    model = langchain_model(server)
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

    def get_w(city: str) -> str:
        """Tell the weather."""
        return city

    model = model.bind_tools([get_w], tool_choice="auto", strict=True)

    asked = [SystemMessage("Be brief."), HumanMessage("hi")]
    called = model.invoke(asked)
    assert server.engine.seen[-1][1].structure_after == "<tool_call>"
    result = ToolMessage("Sunny.", tool_call_id=called.tool_calls[0]["id"])
    assert model.invoke([*asked, called, result]).content == "I look."
    prompt = bytes(token for token in server.engine.seen[-1][0] if token < 256).decode()
    assert '[calls get_w {"city": "Bern"}]' in prompt and prompt.endswith("(tool)Sunny.")


def test_langchain_speaks_the_responses_protocol(server: LiveServer) -> None:
    answer = langchain_model(server, use_responses_api=True).bind_tools([TOOL]).invoke("hi")
    assert answer.tool_calls[0]["args"] == {"city": "Bern"}
    assert "I look." in str(answer.content)


def test_langchain_gets_the_form_it_asks_for(
    start_model: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("langchain_openai", reason=REASON)
    server = start_model(make_random(tmp_path_factory.mktemp("random")))
    schema = {
        "title": "Weather",
        "description": "What it is like.",
        "type": "object",
        "properties": {"sky": {"enum": ["clear", "grey"]}},
        "required": ["sky"],
        "additionalProperties": False,
    }
    model = langchain_model(server).with_structured_output(schema, method="json_schema")
    assert model.invoke("hi")["sky"] in ("clear", "grey")


# --- lm-eval --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["huggingface", "remote"])
def test_lm_eval_reads_log_likelihoods_and_answers(
    dice: LiveServer, dice_folder: Path, backend: str
) -> None:
    pytest.importorskip("lm_eval", reason=REASON)
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        base_url=f"{dice.url}/v1/completions",
        model="tiny",
        tokenizer_backend=backend,
        tokenizer=str(dice_folder),
        max_length=128,
    )

    def ask(kind: str, *arguments: Any) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    asked = [ask("loglikelihood", "[[S1]]", face) for face in SHARES]
    found = model.loglikelihood(asked)
    for (logprob, is_greedy), share in zip(found, SHARES.values(), strict=True):
        assert logprob == pytest.approx(math.log(share), abs=2e-3)
        assert is_greedy == (share == 0.4)
    until = {"until": ["B"], "max_gen_toks": 4, "do_sample": False}
    (text,) = model.generate_until([ask("generate_until", "[[S1]]", until)])
    assert text.startswith("A")


def evaluate(server: LiveServer, kind: str, route: str, tmp_path: Path, **task: Any) -> Any:
    """Let lm-eval run a task over four documents of a local file, as its command line does."""
    lm_eval = pytest.importorskip("lm_eval", reason=REASON)
    documents = tmp_path / "documents.jsonl"
    lines = [{"cue": "[[S1]]", "faces": list(SHARES), "right": right} for right in range(4)]
    documents.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {
        "model": "tiny",
        "base_url": f"{server.url}{route}",
        "tokenizer_backend": "remote" if kind == "local-completions" else None,
        "max_length": 128,
        "num_concurrent": 2,
    }
    return lm_eval.simple_evaluate(
        model=kind,
        model_args={name: value for name, value in options.items() if value is not None},
        tasks=[
            {
                "task": "faces",
                "dataset_path": "json",
                "dataset_kwargs": {
                    "data_files": {"test": str(documents)},
                    "cache_dir": str(tmp_path / "cache"),
                },
                "test_split": "test",
                "doc_to_text": "{{cue}}",
                "target_delimiter": "",
                **task,
            }
        ],
        apply_chat_template=kind == "local-chat-completions",
        bootstrap_iters=0,
    )


def test_lm_eval_scores_a_task_of_choices(dice: LiveServer, tmp_path: Path) -> None:
    result = evaluate(
        dice,
        "local-completions",
        "/v1/completions",
        tmp_path,
        output_type="multiple_choice",
        doc_to_choice="{{faces}}",
        doc_to_target="{{right}}",
        metric_list=[{"metric": "acc"}],
    )
    # Of the four documents the likeliest face is right in one.
    assert result["results"]["faces"]["acc,none"] == 0.25
    told = [float(choice[0]) for choice in result["samples"]["faces"][0]["filtered_resps"]]
    assert told == pytest.approx([math.log(share) for share in SHARES.values()], abs=2e-3)


@pytest.mark.parametrize(
    ("kind", "route"),
    [
        ("local-completions", "/v1/completions"),
        ("local-chat-completions", "/v1/chat/completions"),
    ],
)
def test_lm_eval_scores_a_task_of_answers(
    dice: LiveServer, tmp_path: Path, kind: str, route: str
) -> None:
    result = evaluate(
        dice,
        kind,
        route,
        tmp_path,
        output_type="generate_until",
        doc_to_target="{{faces[right]}}",
        generation_kwargs={"until": ["[["], "max_gen_toks": 1, "do_sample": False},
        metric_list=[{"metric": "exact_match"}],
    )
    assert result["results"]["faces"]["exact_match,none"] == 0.25
