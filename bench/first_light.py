"""First figures on a GPU: every kernel against its reference, then decode steps under CUDA graphs.

Run: python bench/first_light.py --out DIR
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import torch  # noqa: E402
import triton  # noqa: E402
from treadle.bench.random_models import build_engine, fill_rows  # noqa: E402
from treadle.runtime.verify import verify_program  # noqa: E402


def check(name: str, layers: int) -> list[dict[str, object]]:
    """Verify decode programs of several buckets, and a mixed step."""
    rows = []
    for bucket in (1, 2, 8, 32):
        engine = build_engine(name, max_rows=bucket, window=512, max_step_tokens=256, num_layers=layers)
        fill_rows(engine, bucket, 129)
        program = engine.programs["decode", bucket]
        graph = engine.graphs[program.plan.form]
        for result in verify_program(program, graph, engine.state, engine.weights, bucket, bucket):
            rows.append({"bucket": bucket, **vars(result), "passed": result.passed})
    bad = [row for row in rows if not row["passed"]]
    worst = max(rows, key=lambda row: float(str(row["error"])))
    print(f"{name}: {len(rows)} results, {len(bad)} failed; worst {worst}", flush=True)
    for row in bad[:10]:
        print("   FAILED", row, flush=True)
    return rows


def time_decode(name: str, batches: tuple[int, ...], context: int) -> list[dict[str, object]]:
    """Time whole decode steps under a CUDA graph."""
    out = []
    for batch in batches:
        engine = build_engine(name, max_rows=batch, window=context + 256, max_step_tokens=max(256, batch))
        fill_rows(engine, batch, context)
        start = time.time()
        graphed = engine.graphed(batch)
        seconds = time.time() - start
        length = engine.state.tensors["length"]
        times = []
        for _ in range(25):
            length.fill_(context)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphed.run(batch, batch)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        values = engine.programs["decode", batch].values
        assert bool(torch.isfinite(values["logits"]).all()), "logits are not finite"
        row = {"model": name, "batch": batch, "context": context, "ms": sorted(times)[12], "capture_s": seconds}
        out.append(row)
        print(row, flush=True)
        del engine, graphed
        torch.cuda.empty_cache()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--batches", default="1,8,32")
    out = parser.parse_args().out
    result: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    batches = tuple(int(b) for b in parser.parse_args().batches.split(","))
    for key, job in (
        ("check smollm2", lambda: check("smollm2-135m", 2)),
        ("check 1b", lambda: check("llama-3.2-1b", 2)),
        ("check 8b", lambda: check("llama-3.1-8b", 2)),
        ("decode 1b", lambda: time_decode("llama-3.2-1b", batches, 1024)),
        ("decode 8b", lambda: time_decode("llama-3.1-8b", batches, 1024)),
    ):
        start = time.time()
        try:
            result[key] = job()
        except Exception:
            traceback.print_exc()
            result[key] = traceback.format_exc()
        print(f"-- {key}: {time.time() - start:.1f} s", flush=True)
        (out / "first_light.json").write_text(json.dumps(result, indent=1, default=str))


if __name__ == "__main__":
    main()
