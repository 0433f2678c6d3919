"""Tune programs of the benchmark models on this GPU, then time whole steps with the result.

Run: python bench/tune.py --out DIR --work llama-3.1-8b:decode:1x1024,llama-3.1-8b:mixed:1x1024
Writes DIR/<GPU>.json (the table, to ship in kernels/tuned_tables/) and DIR/tune.json (all timings).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import torch  # noqa: E402

from treadle.bench.random_models import build_engine, build_graphs  # noqa: E402
from treadle.kernels.tuned import TunedTable, shipped_table  # noqa: E402
from treadle.runtime import machine  # noqa: E402
from treadle.runtime.config import KV_DTYPES, EngineConfig  # noqa: E402
from treadle.runtime.trial import time_graph_ms  # noqa: E402
from treadle.runtime.triton_program import GraphedProgram  # noqa: E402
from treadle.runtime.tuner import Effort, Workload, tune_program  # noqa: E402


def main() -> None:
    """Tune the programs of the command line, as many as the time allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument(
        "--work",
        default="llama-3.1-8b:decode:1x1024",
        help="comma-separated MODEL:STEP:SEQUENCESxTOKENS[:FORM]; tokens of context, or of each "
        "prompt; FORM is a form of graph that is not the default, like decode.joined",
    )
    parser.add_argument("--kv-dtype", default="auto", choices=list(KV_DTYPES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--budget-s", type=float, default=480.0)
    parser.add_argument("--only-new", action="store_true", help="leave alone what was tuned before")
    arguments = parser.parse_args()
    deadline = time.time() + arguments.budget_s
    found = machine.look()
    table = shipped_table(found.gpu)
    rows: list[dict[str, object]] = []
    path = arguments.out / f"{found.gpu.replace(' ', '_')}.json"
    for text in arguments.work.split(","):
        if time.time() > deadline:
            print(f"out of time before {text}", flush=True)
            continue
        name, step, sizes, form = [*text.split(":"), ""][:4]
        num_seqs, tokens = map(int, sizes.split("x"))
        work = Workload(step, num_seqs, tokens, form)
        start = time.time()
        kv_format = KV_DTYPES[arguments.kv_dtype]
        engine = EngineConfig(
            "cuda", "bf16", 64, num_seqs, max(work.bucket, 16), tokens + 512, kv_format=kv_format
        )
        graphs = build_graphs(name, engine, arguments.layers).fused
        effort = Effort(only_new=arguments.only_new)
        done = tune_program(graphs, engine, work, table, found.architecture, report, effort=effort)
        table, tunings = done.table, done.tunings
        torch.cuda.empty_cache()
        table.write(path)
        tune_s = round(time.time() - start, 1)
        row = {"work": text, "ms": time_whole(name, work, table, kv_format), "tune_s": tune_s}
        print(row, flush=True)
        for reason in list({t.failure for k in tunings for t in k.timings if t.failure})[:3]:
            print("   failed:", reason[:200], flush=True)
        rows.append(row | {"tunings": [asdict(tuning) for tuning in tunings]})
        (arguments.out / "tune.json").write_text(json.dumps(rows, indent=1))


def report(text: str) -> None:
    """Print what was decided; the rest is too much."""
    if text.startswith("tuned"):
        print("  ", text, flush=True)


def time_whole(name: str, work: Workload, table: TunedTable, kv_format: str = "") -> float:
    """Time the program on the whole model with the tuned table; milliseconds."""
    whole = build_engine(
        name,
        max_rows=work.num_seqs,
        window=work.context_tokens + 512,
        max_step_tokens=max(work.bucket, 16),
        table=table,
        kv_format=kv_format,
        form_of=(lambda rows: work.other_form) if work.other_form else None,
    )
    sizes = (work.bucket, work.num_seqs)
    if work.step == "decode":
        whole.trial.fill(work.num_seqs, work.context_tokens)
    else:
        whole.trial.fill_prompts(work.num_seqs, work.context_tokens)
    program = whole.programs[work.step, work.bucket]
    graphed = GraphedProgram(program, torch.cuda.graph_pool_handle(), sizes)
    times = time_graph_ms(graphed, whole.trial, work.context_tokens, 31)
    assert bool(torch.isfinite(program.values["logits"]).all()), "logits are not finite"
    del graphed, whole, program
    torch.cuda.empty_cache()
    return statistics.median(times)


if __name__ == "__main__":
    main()
