"""What /metrics tells, by reading it as Prometheus does; and the dashboard made for it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from treadle.runtime.host_pages import HostStats

from .fake_engine import say
from .live import LiveServer

DASHBOARD = Path(__file__).resolve().parents[2] / "docs/grafana.json"


@pytest.fixture(scope="module")
def server(start_fake: Any, eos: int) -> LiveServer:
    server = start_fake(
        next_token=say("0123456789", then=eos), step_s=0.01, server={"vllm_metric_names": True}
    )
    server.chat("hi")
    server.complete("hi", max_tokens=3, stream=True)
    return server


def samples(server: LiveServer) -> dict[str, float]:
    """Give every sample by its name and labels."""
    text = server.get("/metrics").body.decode()
    return {
        sample.name + json.dumps(sample.labels, sort_keys=True) * bool(sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_times_and_tokens_of_answers_are_counted(server: LiveServer) -> None:
    found = samples(server)
    for name in (
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "answer_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert found[f"treadle_{name}_count"] == 2
    assert found["treadle_request_generation_tokens_sum"] == 11 + 3
    assert 0.005 < found["treadle_time_per_output_token_seconds_sum"] / 2 < 1
    assert found["treadle_prefix_cache_queries_total"] > found["treadle_prefix_cache_hits_total"]
    assert found['treadle_answers_total{"endpoint": "chat", "finish_reason": "stop"}'] == 1


def test_the_figures_of_host_memory_are_the_engine_s(start_fake: Any) -> None:
    host = HostStats(
        pages_total=100,
        pages_free=40,
        hit_tokens_total=320,
        pages_out_total=70,
        pages_in_total=20,
        bytes_out_total=7000,
        bytes_in_total=2000,
    )
    found = samples(start_fake(host=host))
    assert {name: value for name, value in found.items() if "host" in name} == {
        "treadle_kv_host_pages": 100,
        "treadle_kv_host_pages_free": 40,
        "treadle_prefix_cache_host_hits_total": 320,
        "treadle_kv_host_pages_out_total": 70,
        "treadle_kv_host_pages_in_total": 20,
        "treadle_kv_host_bytes_out_total": 7000,
        "treadle_kv_host_bytes_in_total": 2000,
    }


def test_dashboards_made_for_vllm_find_their_names(server: LiveServer) -> None:
    found = samples(server)
    label = '{"model_name": "tiny"}'
    assert found[f"vllm:num_requests_running{label}"] == 0
    assert found[f"vllm:generation_tokens_total{label}"] == 11 + 3
    assert found[f"vllm:time_to_first_token_seconds_count{label}"] == 2
    ended = [name for name in found if name.startswith("vllm:request_success_total")]
    assert any('"finished_reason": "length"' in name for name in ended)


def test_without_the_option_there_is_one_set_of_names(start_fake: Any) -> None:
    assert b"vllm:" not in start_fake().get("/metrics").body


def test_the_dashboard_asks_for_metrics_that_there_are(server: LiveServer) -> None:
    there = {re.split(r"[{]", name)[0] for name in samples(server)}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(asked) > 8
    for expression in asked:
        names = re.findall(r"treadle_\w+", expression)
        assert names and set(names) <= there, expression
