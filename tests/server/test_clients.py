"""Clients that people use, against a live server. The heavy ones are not installed here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_dice

from . import tiny
from .fake_engine import FakeEngine, say
from .live import LiveServer
from .test_tools import CALL, TEMPLATE, TOOL

pytestmark = pytest.mark.slow
REASON = "not installed: pip install litellm langchain-openai 'lm-eval[api]'"


@pytest.fixture(scope="module")
def server(start_server: Any, tmp_path_factory: pytest.TempPathFactory, eos: int) -> LiveServer:
    folder = tiny.save_byte_level(tmp_path_factory.mktemp("clients"), template=TEMPLATE)
    text = f"<think>Hm.</think>I look.\n{CALL}"
    return start_server(lambda: FakeEngine(folder, say(text, then=eos), max_model_len=2048))


@pytest.fixture(scope="module")
def dice_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dice(tmp_path_factory.mktemp("dice")).path


@pytest.mark.parametrize("stream", [False, True])
def test_litellm(server: LiveServer, stream: bool) -> None:
    litellm = pytest.importorskip("litellm", reason=REASON)
    answer = litellm.completion(
        model="hosted_vllm/tiny",
        api_base=f"{server.url}/v1",
        api_key="EMPTY",
        messages=[{"role": "user", "content": "hi"}],
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


def test_langchain_with_tools(server: LiveServer) -> None:
    langchain = pytest.importorskip("langchain_openai", reason=REASON)
    model = langchain.ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0, stream_usage=True
    ).bind_tools([TOOL])
    whole = model.invoke("hi")
    assert whole.content == "I look."
    assert whole.tool_calls[0]["args"] == {"city": "Bern"}
    total = None
    for chunk in model.stream("hi"):
        total = chunk if total is None else total + chunk
    assert total is not None and total.content == whole.content
    assert total.tool_calls[0]["args"] == {"city": "Bern"}
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def test_lm_eval_reads_log_likelihoods_and_answers(start_model: Any, dice_folder: Path) -> None:
    pytest.importorskip("lm_eval", reason=REASON)
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    server = start_model(dice_folder)
    model = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="tiny",
        tokenizer_backend="huggingface",
        tokenizer=str(dice_folder),
        max_length=128,
    )

    def ask(kind: str, *arguments: Any) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    asked = [ask("loglikelihood", "[[S1]]", face) for face in "ABCD"]
    found = model.loglikelihood(asked)
    for (logprob, is_greedy), share in zip(found, (0.4, 0.3, 0.2, 0.1), strict=True):
        assert logprob == pytest.approx(math.log(share), abs=2e-3)
        assert is_greedy == (share == 0.4)
    until = {"until": ["B"], "max_gen_toks": 4, "do_sample": False}
    (text,) = model.generate_until([ask("generate_until", "[[S1]]", until)])
    assert text.startswith("A")
