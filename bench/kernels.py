"""Time every emitted kernel of a model's plan beside cuBLAS and torch's SDPA, in one run.

Run: python bench/kernels.py --model llama-3.1-8b --batches 1,2,8,32,64,256 --prompts 1x1024,8x1024
A kernel's time is that of its launches alone in a CUDA graph, layer after layer, each on its own
weights: the L2 cache is as cold as in a step. The peers run over the same weights the same way.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from treadle.bench.random_models import CONFIGS, BenchEngine, build_engine  # noqa: E402
from treadle.bench.rows import Row, conditions, with_goal, write_rows  # noqa: E402
from treadle.bench.timing import Spread, time_us  # noqa: E402
from treadle.ir.cost import op_cost  # noqa: E402
from treadle.ir.graph import Graph, Op  # noqa: E402
from treadle.runtime import machine  # noqa: E402
from treadle.runtime.planner import bucket_dims  # noqa: E402
from treadle.runtime.roofs import Roofs, measure_roofs  # noqa: E402
from treadle.runtime.trial import SelectedProgram  # noqa: E402
from treadle.runtime.triton_program import TritonProgram  # noqa: E402
from treadle.runtime.tuner import Workload  # noqa: E402

CUBLAS, SDPA = "cuBLAS", "torch SDPA"


@dataclass(frozen=True)
class Measured:
    """One kernel of one step, its launches' time each, and the peer's for the same op."""

    model: str
    work: Workload
    kernel: str
    launches: int
    rows: int
    spread: Spread
    flops: int
    bytes: int
    peer: str = ""
    peer_us: float = 0.0
    weights: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """The peer's time over ours: above 1 ours is faster."""
        return self.peer_us / self.spread.us if self.peer_us else 0.0

    @property
    def is_layer_projection(self) -> bool:
        """Say whether it is a linear of the layers, not the head."""
        return self.peer == CUBLAS and not any("head" in name for name in self.weights)


def measure(
    name: str, work: Workload, *, target: str, dtype: str, layers: int, rounds: int, page_size: int
) -> Iterator[Measured]:
    """Time each kernel of the program that plays this work."""
    bucket = max(work.bucket, 16) if work.step == "mixed" else work.bucket
    engine = build_engine(
        name,
        max_rows=work.num_seqs,
        window=work.context_tokens + page_size,
        max_step_tokens=max(work.bucket, 16),
        target=target,
        dtype=dtype,
        page_size=page_size,
        num_layers=layers,
        only=(work.step, bucket),
    )
    if work.step == "decode":
        engine.trial.fill(work.num_seqs, work.context_tokens)
    else:
        engine.trial.fill_prompts(work.num_seqs, work.context_tokens)
    program = engine.programs[work.step, bucket]
    graph = engine.trial.graphs[program.plan.form]
    ops = {op.name: op for op in graph.ops}
    length = engine.trial.state.tensors["length"]
    device = length.device
    length.fill_(work.context_tokens)
    program.run(work.bucket, work.num_seqs)  # each kernel finds what those before it leave
    by_module: dict[str, list[int]] = {}
    for index, launch in enumerate(program.plan.launches):
        by_module.setdefault(launch.kernel, []).append(index)
    dims = bucket_dims(engine.trial.engine, work.step, bucket)
    # Of a causal score half is computed.
    dims["C"] = work.context_tokens // (2 if work.step == "mixed" else 1)
    for module, indices in by_module.items():
        selected = SelectedProgram(program, indices)
        spread = time_us(
            lambda selected=selected: selected.run(work.bucket, work.num_seqs),  # type: ignore[misc]
            device,
            rounds,
            before=lambda: length.fill_(work.context_tokens),
        )
        mine = [ops[program.plan.launches[index].op] for index in indices]
        cost = op_cost(mine[0], graph, dims)
        found = Measured(
            name,
            work,
            module.partition(".")[0],
            len(indices),
            _rows(mine[0], program),
            spread.per(len(indices)),
            cost.flops,
            cost.bytes,
        )
        yield _with_peer(found, mine, graph, engine, program, rounds)


def _rows(op: Op, program: TritonProgram) -> int:
    shapes = [program.values[name].shape for name in op.outputs if name in program.values]
    return shapes[0][0] if shapes else 0


def _with_peer(
    found: Measured,
    ops: list[Op],
    graph: Graph,
    engine: BenchEngine,
    program: TritonProgram,
    rounds: int,
) -> Measured:
    """Time the library's way to do the op's heavy part, over the same weights or as much cache."""
    kinds = {inner.kind: inner for inner in ops[0].plain}
    device = engine.trial.state.packed.device
    if "linear" in kinds:
        names = [name for op in ops for name in op.inputs if name.startswith("@")]
        matrices = [
            (name, program.tensors[name]) for name in names if program.tensors[name].dim() == 2
        ]
        inputs = {
            tensor.shape[1]: torch.randn(
                found.rows, tensor.shape[1], device=device, dtype=tensor.dtype
            )
            for _, tensor in matrices
        }

        def multiply() -> None:
            for _, tensor in matrices:
                torch.mm(inputs[tensor.shape[1]], tensor.t())

        peer = time_us(multiply, device, rounds).per(len(ops))
        weights = tuple(name for name, _ in matrices)
        return replace(found, peer=CUBLAS, peer_us=peer.us, weights=weights)
    if "attention" in kinds:
        params = kinds["attention"].params
        count, context = found.work.num_seqs, found.work.context_tokens
        is_prompt = found.work.step == "mixed"
        dtype = graph.type_of(ops[0].outputs[0]).dtype
        cache = next(iter(engine.trial.state.caches.values()))[0]
        assert dtype, "an attention has a result"

        def tensor(heads: int, tokens: int) -> torch.Tensor:
            shape = (count, heads, tokens, params.head_dim)
            return torch.randn(*shape, device=device, dtype=cache.dtype)

        query = tensor(params.num_heads, context if is_prompt else 1)
        caches = [
            (tensor(params.num_kv_heads, context), tensor(params.num_kv_heads, context))
            for _ in ops
        ]

        def attend() -> None:
            for keys, values in caches:
                F.scaled_dot_product_attention(
                    query, keys, values, is_causal=is_prompt, enable_gqa=True
                )

        peer = time_us(attend, device, rounds).per(len(ops))
        return replace(found, peer=SDPA, peer_us=peer.us)
    return found


def to_row(found: Measured, roofs: Roofs, stated: dict[str, object]) -> Row:
    """Give a kernel's row: µs, with rates and shares of the roofs among the conditions."""
    moved = found.bytes / found.spread.us * 1e6
    computed = found.flops / found.spread.us * 1e6
    case = f"{found.model} {found.work} {found.kernel} {found.rows} rows"
    if found.weights:
        case += f" {found.weights[0].rpartition('.')[2].lstrip('@')}"
    more: dict[str, object] = {
        "launches": found.launches,
        "p10": found.spread.low,
        "p90": found.spread.high,
        "gb_per_s": moved / 1e9,
        "tflop_per_s": computed / 1e12,
        "of_memory_roof": moved / roofs.bytes_per_s,
        "of_compute_roof": computed / roofs.matmul_flops_per_s,
    }
    floor_s = max(found.bytes / roofs.bytes_per_s, found.flops / roofs.matmul_flops_per_s)
    peers = {found.peer: found.peer_us} if found.peer else {}
    return Row(
        "kernels", case, found.spread.us, "µs", "lower", None, 1e6 * floor_s, peers, stated | more
    )


def _most_launched(one: Measured) -> int:
    return -one.launches


def numbered(rows: list[Row]) -> list[Row]:
    """Number the cases that repeat: the first layer's kernels beside those of the others."""
    counts: dict[str, int] = {}
    found = []
    for row in rows:
        counts[row.case] = counts.get(row.case, 0) + 1
        number = counts[row.case]
        found.append(replace(row, case=f"{row.case} ({number})") if number > 1 else row)
    return found


def summaries(
    model: str, found: list[Measured], roofs: Roofs, stated: dict[str, object]
) -> list[Row]:
    """Give the figures that goals are set for, of what was measured."""
    rows: list[Row] = []

    def add(what: str, value: float, unit: str) -> None:
        goal, peers = with_goal("kernels", f"{model} {what}")
        rows.append(
            Row("kernels", f"{model} {what}", value, unit, "higher", goal, None, peers, stated)
        )

    linears = [one for one in found if one.is_layer_projection]
    few = [one.ratio for one in linears if 2 <= one.rows <= 64]
    if few:
        add("projections, 2-64 rows, least", min(few), f"× {CUBLAS}")
        add("projections, 2-64 rows, geometric mean", geometric_mean(few), f"× {CUBLAS}")
    for what, ratios in (
        ("projections, 256 rows", [one.ratio for one in linears if one.rows == 256]),
        ("projections, 1024 rows and more", [one.ratio for one in linears if one.rows >= 1024]),
    ):
        if ratios:
            add(f"{what}, geometric mean", geometric_mean(ratios), f"× {CUBLAS}")
    for one in found:
        sizes = f"{one.work.num_seqs}x{one.work.context_tokens}"
        if one.peer == SDPA and one.work.step == "decode":
            share = one.bytes / one.spread.us * 1e6 / roofs.bytes_per_s
            add(f"decode attention {sizes}", 100 * share, "% of the read ceiling")
        elif one.peer == SDPA:
            add(f"prefill attention {sizes}", one.ratio, f"× {SDPA}")
    return rows


def geometric_mean(values: list[float]) -> float:
    """Give the geometric mean of positive values."""
    return math.exp(sum(map(math.log, values)) / len(values))


def parse_works(batches: str, prompts: str, context: int) -> list[Workload]:
    """Read the lists of the command line."""
    works = [Workload("decode", int(n), context) for n in filter(None, batches.split(","))]
    for text in filter(None, prompts.split(",")):
        count, tokens = map(int, text.split("x"))
        works.append(Workload("mixed", count, tokens))
    return works


def main(arguments: list[str] | None = None) -> None:
    """Time the kernels of the command line's steps and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(CONFIGS))
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256", help="decode steps")
    parser.add_argument("--prompts", default="1x1024,8x1024,1x8192", help="prompts x tokens each")
    parser.add_argument("--context", type=int, default=1024, help="tokens before a decode step")
    parser.add_argument("--layers", type=int, default=4, help="of the model; 0 for all")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--target", default="cuda", choices=["cuda", "interpret"])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f16", "f32"])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--out", type=Path, help="a folder for kernels.json (default: results/)")
    asked = parser.parse_args(arguments)
    device = machine.device_of(asked.target)
    roofs = measure_roofs(device, small=device.type != "cuda")
    stated = conditions(
        dtype=asked.dtype, weights="random", page_size=asked.page_size, roofs=roofs.to_json()
    )
    found: list[Measured] = []
    for work in parse_works(asked.batches, asked.prompts, asked.context):
        for one in measure(
            asked.model,
            work,
            target=asked.target,
            dtype=asked.dtype,
            layers=asked.layers,
            rounds=asked.rounds,
            page_size=asked.page_size,
        ):
            found.append(one)
            peer = f", {one.peer} {one.peer_us:.2f} ({one.ratio:.2f}×)" if one.peer else ""
            print(f"{work} {one.kernel} ×{one.launches}: {one.spread.us:.2f} µs{peer}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    rows = numbered([to_row(one, roofs, stated) for one in sorted(found, key=_most_launched)])
    rows += summaries(asked.model, found, roofs, stated)
    print(write_rows("kernels", rows, asked.out))


if __name__ == "__main__":
    main()
