"""Time whole mixed steps of prompts: input preparation, all layers, head and sampling.

Run: python bench/prefill.py --models llama-3.1-8b --prompts 1x512,1x1024,1x2048,8x1024,1x8192
On a GPU the step is captured in a graph for timing, so that the host's launches are left out;
`launched_ms` among the conditions is the step as it is served, with them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import torch  # noqa: E402

from treadle.bench.random_models import BenchEngine, build_engine  # noqa: E402
from treadle.bench.rows import Row, conditions, with_goal, write_rows  # noqa: E402
from treadle.bench.timing import time_us  # noqa: E402
from treadle.ir.cost import op_cost  # noqa: E402
from treadle.runtime import machine  # noqa: E402
from treadle.runtime.planner import bucket_dims  # noqa: E402
from treadle.runtime.roofs import best_seconds  # noqa: E402

MATMUL_FLOPS_PER_S = 786e12  # measured on an H200: bf16 matmul


def floor_ms(engine: BenchEngine, num_seqs: int, tokens: int) -> float:
    """Give the time of the step's arithmetic alone; of a causal score half is computed."""
    trial = engine.trial
    dims = bucket_dims(trial.engine, "mixed", num_seqs * tokens)
    dims = {**dims, "C": tokens // 2, "B": num_seqs}
    graph = trial.graphs["mixed"]
    return 1e3 * sum(op_cost(op, graph, dims).flops for op in graph.ops) / MATMUL_FLOPS_PER_S


def main(arguments: list[str] | None = None) -> None:
    """Time the cases of the command line and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-3.1-8b")
    parser.add_argument("--prompts", default="1x512,1x1024,1x2048,8x1024,1x8192")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0 for all")
    parser.add_argument("--target", default="cuda", choices=["cuda", "interpret"])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f16", "f32"])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--out", type=Path, help="a folder for prefill.json (default: results/)")
    asked = parser.parse_args(arguments)
    device = machine.device_of(asked.target)
    rows: list[Row] = []
    for name in asked.models.split(","):
        for text in asked.prompts.split(","):
            num_seqs, tokens = map(int, text.split("x"))
            total = num_seqs * tokens
            engine = build_engine(
                name,
                max_rows=num_seqs,
                window=tokens + asked.page_size,
                max_step_tokens=max(total, 16),
                target=asked.target,
                dtype=asked.dtype,
                page_size=asked.page_size,
                num_layers=asked.layers,
                only=("mixed", max(total, 16)),
            )
            engine.trial.fill_prompts(num_seqs, tokens)
            program = engine.programs["mixed", max(total, 16)]
            length = engine.trial.state.tensors["length"]

            def step(
                program: object = program, total: int = total, num_seqs: int = num_seqs
            ) -> None:
                program.run(total, num_seqs)  # type: ignore[attr-defined]

            launched_ms = 1e3 * best_seconds(step, device, rounds=min(asked.rounds, 5))
            spread = time_us(
                step,
                device,
                asked.rounds,
                before=lambda length=length, tokens=tokens: length.fill_(tokens),  # type: ignore[misc]
            )
            assert bool(torch.isfinite(program.values["logits"]).all()), "logits are not finite"
            case = f"{name} {text}"
            goal, peers = with_goal("prefill", case)
            stated = conditions(
                dtype=asked.dtype,
                weights="random",
                page_size=asked.page_size,
                launched_ms=launched_ms,
                p10=spread.low / 1e3,
                p90=spread.high / 1e3,
                tokens_per_s=total / spread.us * 1e6,
            )
            floor = floor_ms(engine, num_seqs, tokens)
            value = spread.us / 1e3
            rows.append(Row("prefill", case, value, "ms", "lower", goal, floor, peers, stated))
            print(f"{case}: {value:.3f} ms, goal {goal}, floor {floor:.2f}", flush=True)
            del engine, program
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(write_rows("prefill", rows, asked.out))


if __name__ == "__main__":
    main()
