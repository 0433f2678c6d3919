"""Measure what quantised keys and values cost in accuracy, of the forms there are and of others.

Run: python bench/quality.py --model MODEL --windows 16 --forms int8,fp8,int4
Attention's error is on synthetic keys and values; perplexity, KL divergence and agreement are of
the model over English text that comes with Python (`pydoc_data.topics`). Needs no GPU.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import torch  # noqa: E402

from treadle.bench.rows import Row, conditions, with_goal, write_rows  # noqa: E402
from treadle.models.registry import build_graph, read_config  # noqa: E402
from treadle.runtime.checkpoint import open_checkpoint  # noqa: E402
from treadle.runtime.quality import (  # noqa: E402
    FORMS,
    KINDS,
    Form,
    attention_error,
    compare_text,
    synthetic,
)
from treadle.runtime.tokenizer import Tokenizer  # noqa: E402
from treadle.runtime.weights import load_weights  # noqa: E402

TOKENS, HEAD_DIM, SEED = 4096, 128, 1


def measure_attention(forms: list[Form], stated: dict[str, object]) -> list[Row]:
    """Measure attention's error per kind of synthetic keys: with values quantised too, and not."""
    rows = []
    for kind in KINDS:
        q, k, v = synthetic(kind, tokens=TOKENS, head_dim=HEAD_DIM, seed=SEED)
        for form in forms:
            for what, values in (("keys and values", True), ("keys only", False)):
                error = 100 * attention_error(form, q, k, v, quantises_values=values)
                case = f"{form.name}, {kind}, {what}"
                goal, peers = with_goal("quality", case)
                rows.append(Row("quality", case, error, "%", "lower", goal, None, peers, stated))
                print(f"{case}: {error:.2f} %", flush=True)
    return rows


def measure_text(
    source: Path, forms: list[Form], num_windows: int, window_tokens: int
) -> list[Row]:
    """Measure perplexity and what goes with it over windows spread evenly through the text."""
    checkpoint = open_checkpoint(source)
    config = read_config(checkpoint.config)
    graph = build_graph(config, step="mixed", dtype="f32", page_size=64)
    device = torch.device("cpu")
    weights = load_weights(
        graph.weights, checkpoint, device=device, max_context_tokens=window_tokens
    )
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    token_ids = Tokenizer.from_source(checkpoint).encode(text)
    stride = (len(token_ids) - window_tokens) // max(num_windows, 1)
    windows = [
        token_ids[start : start + window_tokens] for start in range(0, stride * num_windows, stride)
    ]
    stated = conditions(
        model=source.name, text="pydoc_data.topics", windows=num_windows, tokens=window_tokens
    )
    rows = []
    for form, found in compare_text(graph, weights, windows, forms):
        figures = {
            "perplexity change": (100 * found.perplexity_change, "%", "lower"),
            "KL divergence": (found.kl_divergence, "nats", "lower"),
            "same choice": (100 * found.same_choice, "% of tokens", "higher"),
            "agreement": (found.agreement_tokens, "tokens", "higher"),
        }
        print(
            f"{form.name}: perplexity {found.perplexity:.4f} ({100 * found.perplexity_change:+.3f} "
            f"%), KL {found.kl_divergence:.5f}, same choice {100 * found.same_choice:.1f} %, "
            f"agreement {found.agreement_tokens:.0f} tokens, {form.bits:.2f} bits",
            flush=True,
        )
        for what, (value, unit, better) in figures.items():
            case = f"{form.name}, {what}"
            goal, peers = with_goal("quality", case)
            more = stated | {"bits": form.bits, "plain_perplexity": found.plain_perplexity}
            rows.append(Row("quality", case, value, unit, better, goal, None, peers, more))
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure the forms of the command line and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model folder or GGUF file; none: no text")
    parser.add_argument("--forms", default=",".join(FORMS), help=", ".join(FORMS))
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024, help="of a window")
    parser.add_argument("--out", type=Path, help="a folder for quality.json (default: results/)")
    asked = parser.parse_args(arguments)
    names = [name.strip() for name in asked.forms.split(",")]
    forms = [FORMS[name] for name in names if name in FORMS]
    if len(forms) != len(names):
        parser.error(f"unknown forms among {names}; known are {list(FORMS)}")
    rows = measure_attention(forms, conditions(tokens=TOKENS, head_dim=HEAD_DIM))
    if asked.model:
        rows += measure_text(asked.model, forms, asked.windows, asked.tokens)
    print(write_rows("quality", rows, asked.out))


if __name__ == "__main__":
    main()
