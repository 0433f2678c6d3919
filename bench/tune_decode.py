"""Tune decode steps of the benchmark models on this GPU, then time whole steps with the result.

Run: python bench/tune_decode.py --out DIR --models llama-3.1-8b --buckets 1,8,32
Writes DIR/<GPU>.json (the table, to ship in kernels/tuned_tables/) and DIR/tune_decode.json (timings).
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
from treadle.kernels.tuned import shipped_table  # noqa: E402
from treadle.runtime import machine  # noqa: E402
from treadle.runtime.config import EngineConfig  # noqa: E402
from treadle.runtime.trial import time_graph_ms  # noqa: E402
from treadle.runtime.tuner import tune_decode  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--models", default="llama-3.1-8b")
    parser.add_argument("--buckets", default="1,8,32")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--budget-s", type=float, default=480.0)
    arguments = parser.parse_args()
    deadline = time.time() + arguments.budget_s
    found = machine.look()
    table = shipped_table(found.gpu)
    rows: list[dict[str, object]] = []
    buckets = [int(text) for text in arguments.buckets.split(",")]
    path = arguments.out / f"{found.gpu.replace(' ', '_')}.json"
    for name in arguments.models.split(","):
        for bucket in buckets:
            if time.time() > deadline:
                print(f"out of time before {name} at {bucket}", flush=True)
                continue
            start = time.time()
            window = arguments.context + 512
            engine = EngineConfig("cuda", "bf16", 64, bucket, max(bucket, 16), window)
            graphs = build_graphs(name, engine, arguments.layers).fused

            def report(text: str) -> None:
                if text.startswith("tuned"):
                    print("  ", text, flush=True)

            table, tunings = tune_decode(
                graphs, engine, bucket, arguments.context, table, found.architecture, report
            )
            torch.cuda.empty_cache()
            table.write(path)
            tuned_s = time.time() - start
            whole = build_engine(
                name, max_rows=bucket, window=window, max_step_tokens=max(bucket, 16), table=table
            )
            whole.trial.fill(bucket, arguments.context)
            graphed = whole.graphed(bucket)
            times = time_graph_ms(graphed, whole.trial, arguments.context, 31)
            logits = whole.programs["decode", bucket].values["logits"]
            assert bool(torch.isfinite(logits).all()), "logits are not finite"
            row = {"model": name, "batch": bucket, "context": arguments.context}
            row |= {"ms": statistics.median(times), "tune_s": round(tuned_s, 1)}
            print(row, flush=True)
            failed = {t.failure for k in tunings for t in k.timings if t.failure}
            for reason in list(failed)[:5]:
                print("   failed:", reason[:200], flush=True)
            rows.append(row | {"tunings": [asdict(tuning) for tuning in tunings]})
            (arguments.out / "tune_decode.json").write_text(json.dumps(rows, indent=1))
            del whole, graphed
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
