"""/v1/embeddings against transformers, and what is refused."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import load_oracle, make_random, oracle_hidden

from .live import LiveServer

MODES = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens"}


@dataclass(frozen=True)
class Served:
    """A server, its model's folder, and how that declares its pooling."""

    server: LiveServer
    folder: Path
    pooling: str


@pytest.fixture(scope="module", params=["last", "mean"])
def served(request: Any, start_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = make_random(tmp_path_factory.mktemp(request.param), seed=3)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({MODES[request.param]: True}))
    return Served(start_model(folder), folder, request.param)


@pytest.fixture(scope="module")
def plain(start_model: Any, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    return start_model(make_random(tmp_path_factory.mktemp("plain")))


def expected(served: Served, token_ids: list[int]) -> np.ndarray:
    hidden = oracle_hidden(load_oracle(served.folder), token_ids).double().numpy()
    pooled = hidden[-1] if served.pooling == "last" else hidden.mean(0)
    return pooled / np.linalg.norm(pooled)


def embed(server: LiveServer, text: Any, **fields: Any) -> list[list[float]]:
    reply = server.post("/v1/embeddings", {"input": text} | fields)
    assert reply.status == 200, reply.body
    assert [one["index"] for one in reply.json["data"]] == list(range(len(reply.json["data"])))
    return [one["embedding"] for one in reply.json["data"]]


def test_an_embedding_is_the_pooled_hidden_state_of_transformers(
    served: Served, rng_seed: int
) -> None:
    generator = random.Random(rng_seed)
    lists = [[generator.randrange(320) for _ in range(length)] for length in (1, 17, 100)]
    for found, ids in zip(embed(served.server, lists), lists, strict=True):
        assert np.linalg.norm(found) == pytest.approx(1)
        np.testing.assert_allclose(found, expected(served, ids), atol=1e-4)


def test_texts_are_embedded_as_their_tokens(served: Served) -> None:
    texts = ["Hello there", "Grüße"]
    lists = [served.server.post("/tokenize", {"prompt": text}).json["tokens"] for text in texts]
    of_texts, of_lists = embed(served.server, texts), embed(served.server, lists)
    np.testing.assert_allclose(of_texts, of_lists, atol=1e-5)
    np.testing.assert_allclose(embed(served.server, texts[0]), of_lists[:1], atol=1e-5)
    np.testing.assert_allclose(embed(served.server, lists[0]), of_lists[:1], atol=1e-5)
    bare = served.server.post("/tokenize", {"prompt": "Hi", "add_special_tokens": False}).json
    np.testing.assert_allclose(
        embed(served.server, "Hi", add_special_tokens=False),
        embed(served.server, bare["tokens"]),
        atol=1e-5,
    )


def test_inputs_together_are_embedded_as_alone(served: Served, rng_seed: int) -> None:
    generator = random.Random(rng_seed)
    lists = [[generator.randrange(320) for _ in range(1 + 5 * n % 37)] for n in range(20)]
    alone = [embed(served.server, one)[0] for one in lists]
    np.testing.assert_allclose(embed(served.server, lists), alone, atol=1e-5)


def test_the_client_of_openai_reads_both_encodings(served: Served) -> None:
    client, ids = served.server.client(), [5, 6, 7]
    by_default = client.embeddings.create(model="tiny", input=ids)  # base64
    as_numbers = client.embeddings.create(model="tiny", input=ids, encoding_format="float")
    for answer in (by_default, as_numbers):
        np.testing.assert_allclose(answer.data[0].embedding, expected(served, ids), atol=1e-4)
    encoded = embed(served.server, ids, encoding_format="base64", user="me", dimensions=64)
    assert isinstance(encoded[0], str)


def test_usage_counts_the_tokens_of_all_inputs(served: Served) -> None:
    answer = served.server.post("/v1/embeddings", {"input": [[1, 2, 3], [4]]}).json
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert served.server.is_idle()


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": [[1], [2] * 128]}, "input", "context_length_exceeded"),
        ({"input": "x" * 200}, "input", "context_length_exceeded"),
        ({"input": [10**6]}, "input", "invalid_token_id"),
        ({"input": []}, "input", "empty"),
        ({}, "input", "missing_field"),
        ({"input": "a", "dimensions": 32}, "dimensions", "unsupported_field"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": "a", "temperature": 0}, "temperature", "unknown_field"),
    ],
)
def test_mistakes_are_named(served: Served, fields: Any, param: str, code: str) -> None:
    error = served.server.post("/v1/embeddings", fields).error
    assert (error["param"], error["code"]) == (param, code)


def test_a_model_that_declares_no_pooling_is_refused_with_the_remedy(plain: LiveServer) -> None:
    reply = plain.post("/v1/embeddings", {"input": "a"})
    assert (reply.status, reply.error["code"]) == (400, "unsupported_endpoint")
    assert "--embeddings last" in reply.error["message"]


def test_an_option_says_how_to_pool_whatever_the_folder_declares(
    start_server: Any, tmp_path: Path
) -> None:
    from tests.runtime.serving import compile_tiny
    from treadle.runtime.engine import Engine
    from treadle.runtime.loading import ServeOptions, load_model

    folder = make_random(tmp_path / "model", seed=5)
    artifact = compile_tiny(folder, tmp_path / "artifact")
    options = ServeOptions(pooling="mean")
    server = start_server(
        lambda: Engine("tiny", lambda report: load_model(artifact, options, report))
    )
    found = embed(server, [3, 4, 5])[0]
    by_mean = Served(server, folder, "mean")
    np.testing.assert_allclose(found, expected(by_mean, [3, 4, 5]), atol=1e-4)
