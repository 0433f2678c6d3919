"""The figures of a server: what it counts itself, and the engine's own counters, read when scraped.

Must not know endpoints. Names follow Prometheus' conventions: a prefix, units, `_total`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from treadle.runtime.request import Engine

# Up to half an hour: a long answer on a small machine takes that long.
_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800)
_TOKEN_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
_COUNT_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
# vLLM's name for each of ours that it has too.
VLLM_NAMES = {
    "treadle_requests_running": "vllm:num_requests_running",
    "treadle_requests_waiting": "vllm:num_requests_waiting",
    "treadle_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "treadle_prompt_tokens": "vllm:prompt_tokens",
    "treadle_generation_tokens": "vllm:generation_tokens",
    "treadle_preemptions": "vllm:num_preemptions",
    "treadle_prefix_cache_queries": "vllm:prefix_cache_queries",
    "treadle_prefix_cache_hits": "vllm:prefix_cache_hits",
    "treadle_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "treadle_time_per_output_token_seconds": "vllm:time_per_output_token_seconds",
    "treadle_answer_seconds": "vllm:e2e_request_latency_seconds",
    "treadle_request_prompt_tokens": "vllm:request_prompt_tokens",
    "treadle_request_generation_tokens": "vllm:request_generation_tokens",
    "treadle_answers": "vllm:request_success",
}


class Metrics:
    """Count what the server sees itself; the engine's own counters are read when scraped.

    `vllm_names`: give what vLLM has too under its names, for dashboards that were made for it.
    """

    def __init__(self, engine: Engine, *, vllm_names: bool = False) -> None:
        self.registry = CollectorRegistry()
        engine_collector = _EngineCollector(engine)
        self.registry.register(engine_collector)
        self.http_responses = Counter(
            "treadle_http_responses_total",
            "Responses by route and status.",
            ["route", "status"],
            registry=self.registry,
        )
        self.answers = Counter(
            "treadle_answers_total",
            "Answers by endpoint and by why they ended (`abort`: the client went away).",
            ["endpoint", "finish_reason"],
            registry=self.registry,
        )
        self.first_token_s = Histogram(
            "treadle_time_to_first_token_seconds",
            "From the whole request to the first token of an answer.",
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.answer_s = Histogram(
            "treadle_answer_seconds",
            "From the whole request to the end of an answer.",
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.token_s = Histogram(
            "treadle_time_per_output_token_seconds",
            "Mean time between the tokens of an answer, after the first.",
            buckets=_TOKEN_BUCKETS_S,
            registry=self.registry,
        )
        self.prompt_tokens = Histogram(
            "treadle_request_prompt_tokens",
            "Tokens of the prompt, per answer.",
            buckets=_COUNT_BUCKETS,
            registry=self.registry,
        )
        self.answer_tokens = Histogram(
            "treadle_request_generation_tokens",
            "Tokens of an answer.",
            buckets=_COUNT_BUCKETS,
            registry=self.registry,
        )
        self.cache_queries = Counter(
            "treadle_prefix_cache_queries_total",
            "Prompt tokens that were looked for in the prefix cache.",
            registry=self.registry,
        )
        self.cache_hits = Counter(
            "treadle_prefix_cache_hits_total",
            "Prompt tokens that were found in the prefix cache.",
            registry=self.registry,
        )
        if vllm_names:
            own = (
                engine_collector,
                self.answers,
                self.first_token_s,
                self.answer_s,
                self.token_s,
                self.prompt_tokens,
                self.answer_tokens,
                self.cache_queries,
                self.cache_hits,
            )
            self.registry.register(_VllmNames(own, engine.model_name))


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Read the engine's counters, so that there is one place where they are kept."""
        stats = self._engine.stats()
        host = stats.host
        pages_used = stats.pages_total - stats.pages_free
        gauges = {
            "ready": (float(self._engine.ready), "1 when the engine takes requests."),
            "requests_running": (stats.running, "Requests that hold a row of the batch."),
            "requests_waiting": (stats.waiting, "Requests that wait for a row."),
            "kv_pages": (stats.pages_total, "Pages of the KV cache."),
            "kv_pages_free": (stats.pages_free, "Pages that a new request can have."),
            "kv_cache_usage_ratio": (
                pages_used / max(stats.pages_total, 1),
                "Share of the pages in use.",
            ),
            "kv_host_pages": (host.pages_total, "Pages of host memory, for what is evicted."),
            "kv_host_pages_free": (host.pages_free, "Those of them that hold nothing."),
            "last_step_age_seconds": (stats.last_step_age_s, "Time since a step was completed."),
        }
        counters = {
            "steps": (stats.steps_total, "Steps of the engine."),
            "prompt_tokens": (stats.prompt_tokens_total, "Prompt tokens processed."),
            "generation_tokens": (stats.generation_tokens_total, "Tokens generated."),
            "preemptions": (stats.preemptions_total, "Requests evicted for want of pages."),
            "prefix_cache_host_hits": (
                host.hit_tokens_total,
                "Prompt tokens that were found in the prefix cache, in host memory.",
            ),
            "kv_host_pages_out": (host.pages_out_total, "Pages copied to host memory."),
            "kv_host_pages_in": (host.pages_in_total, "Pages copied back from host memory."),
            "kv_host_bytes_out": (host.bytes_out_total, "Bytes copied to host memory."),
            "kv_host_bytes_in": (host.bytes_in_total, "Bytes copied back from host memory."),
            "jit_compiles": (
                stats.jit_compiles_total,
                "Kernels compiled while serving; anything but 0 is a fault.",
            ),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"treadle_{name}", text, value=value)
        for name, (value, text) in counters.items():
            yield CounterMetricFamily(f"treadle_{name}", text, value=value)


class _VllmNames(Collector):
    """Give what others collect once more, renamed and with the model's name as a label."""

    def __init__(self, collectors: Sequence[Collector], model_name: str) -> None:
        self._collectors = collectors
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Rename what the other collectors give."""
        for collector in self._collectors:
            yield from filter(None, map(self._rename, collector.collect()))

    def _rename(self, metric: Metric) -> Metric | None:
        name = VLLM_NAMES.get(metric.name)
        if name is None:
            return None
        renamed = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            labels = {"model_name": self._model_name, **sample.labels}
            if "finish_reason" in labels:
                labels["finished_reason"] = labels.pop("finish_reason")
            new_name = name + sample.name.removeprefix(metric.name)
            renamed.add_sample(new_name, labels, sample.value, exemplar=sample.exemplar)
        return renamed
