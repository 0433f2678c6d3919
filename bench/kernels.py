"""Time every emitted kernel of a model's plan beside cuBLAS and torch's SDPA, in one run.

Run: python bench/kernels.py --model llama-3.1-8b --batches 1,2,8,32,64,256 --prompts 1x1024,8x1024
A kernel's time is that of its launches alone in a CUDA graph, layer after layer, each on its own
weights: the L2 cache is as cold as in a step. The peers run over the same weights the same way, a
round of each in turn, so that all meet the same clocks. The launch of a graph, 8 µs, is shared by
its layers: with fewer of them small kernels look slower.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from treadle.bench.cases import add_options, play  # noqa: E402
from treadle.bench.random_models import CONFIGS, BenchEngine, build_engine  # noqa: E402
from treadle.bench.rows import Row, conditions, with_goal  # noqa: E402
from treadle.bench.timing import Spread, time_in_turn, timed_round  # noqa: E402
from treadle.ir.cost import op_cost  # noqa: E402
from treadle.ir.graph import Op  # noqa: E402
from treadle.kernels.dtypes import TORCH_DTYPES  # noqa: E402
from treadle.runtime import machine  # noqa: E402
from treadle.runtime.config import KV_DTYPES  # noqa: E402
from treadle.runtime.console import print_table  # noqa: E402
from treadle.runtime.plan import bucket_dims  # noqa: E402
from treadle.runtime.roofs import Roofs, measure_roofs  # noqa: E402
from treadle.runtime.trial import SelectedProgram  # noqa: E402
from treadle.runtime.triton_program import TritonProgram  # noqa: E402
from treadle.runtime.tuner import Workload  # noqa: E402

CUBLAS = "cuBLAS"
# Each is a peer where it can do the op; the first of them that can is the one to compare with.
SDPA = {
    "cuDNN SDPA": [SDPBackend.CUDNN_ATTENTION],
    "flash SDPA": [SDPBackend.FLASH_ATTENTION],
    "torch SDPA": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}


@dataclass(frozen=True)
class Measured:
    """One kernel of one step, its launches' time each, and the peers' for the same op, in µs.

    `missing` says of a peer why it is not there.
    """

    model: str
    work: Workload
    kernel: str
    launches: int
    rows: int
    spread: Spread
    flops: int
    bytes: int
    peers: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[str, ...] = ()

    @property
    def peer(self) -> str:
        """The peer to compare with, empty where there is none."""
        return next(iter(self.peers), "")

    @property
    def ratio(self) -> float:
        """That peer's time over ours: above 1 ours is faster."""
        return self.peers[self.peer] / self.spread.us if self.peers else 0.0

    @property
    def is_layer_projection(self) -> bool:
        """Say whether it is a linear of several layers; of one, a graph's launch is most."""
        is_head = any("head" in name for name in self.weights)
        return self.peer == CUBLAS and not is_head and self.launches > 1


def measure(
    name: str,
    work: Workload,
    *,
    target: str,
    dtype: str,
    layers: int,
    rounds: int,
    page_size: int,
    kv_format: str = "",
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
        kv_format=kv_format,
        num_layers=layers,
        only=(work.step, bucket),
        reuse_memory=False,
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
    # The first of a name is that of most layers; others get a number.
    for module, indices in sorted(by_module.items(), key=lambda item: -len(item[1])):
        selected = SelectedProgram(program, indices)
        mine = [ops[program.plan.launches[index].op] for index in indices]
        cost = op_cost(mine[0], graph, dims)
        rows = _rows(mine[0], program)
        ours = timed_round(
            lambda selected=selected: selected.run(work.bucket, work.num_seqs),  # type: ignore[misc]
            device,
            before=lambda: length.fill_(work.context_tokens),
        )
        weights = _matrices(mine, program)
        if weights:
            calls = {CUBLAS: _multiply(list(weights.values()), rows)}
        else:
            calls = _attend(mine, work, engine)
        peers, missing = _ready_peers(calls, device)
        spreads = time_in_turn({"": ours, **peers}, rounds)
        each = {name: spread.per(len(indices)) for name, spread in spreads.items()}
        yield Measured(
            name,
            work,
            module.partition(".")[0],
            len(indices),
            rows,
            each.pop(""),
            cost.flops,
            cost.bytes,
            {peer: spread.us for peer, spread in each.items()},
            missing,
            tuple(weights),
        )


def _rows(op: Op, program: TritonProgram) -> int:
    shapes = [program.values[name].shape for name in op.outputs if name in program.values]
    return shapes[0][0] if shapes else 0


def _matrices(ops: list[Op], program: TritonProgram) -> dict[str, torch.Tensor]:
    """Give the weights that the ops multiply by, by name; none where they are no linears."""
    if not any(inner.kind == "linear" for inner in ops[0].plain):
        return {}
    names = [name for op in ops for name in op.inputs if name.startswith("@")]
    return {name: program.tensors[name] for name in names if program.tensors[name].dim() == 2}


def _ready_peers(
    calls: Mapping[str, Callable[[], object]], device: torch.device
) -> tuple[dict[str, Callable[[], float]], dict[str, str]]:
    """Make each peer's rounds ready, or say why there are none: what fails there stops nothing."""
    ready: dict[str, Callable[[], float]] = {}
    missing: dict[str, str] = {}
    for name, call in calls.items():
        if name == "torch SDPA" and ready:
            continue  # it stands in for those that specialise
        try:
            ready[name] = timed_round(call, device)
        except RuntimeError as error:
            missing[name] = str(error).splitlines()[0].partition(". ")[0]
    return ready, missing


def _multiply(matrices: list[torch.Tensor], rows: int) -> Callable[[], object]:
    """Give the products with each matrix, by cuBLAS on an NVIDIA GPU."""
    inputs = {
        matrix.shape[1]: torch.randn(
            rows, matrix.shape[1], device=matrix.device, dtype=matrix.dtype
        )
        for matrix in matrices
    }

    def multiply() -> None:
        for matrix in matrices:
            torch.mm(inputs[matrix.shape[1]], matrix.t())

    return multiply


def _attend(ops: list[Op], work: Workload, engine: BenchEngine) -> dict[str, Callable[[], object]]:
    """Give each of torch's ways to attend to contiguous keys and values, those of each layer.

    None where the ops do not attend.
    """
    kinds = {inner.kind: inner for inner in ops[0].plain}
    if "attention" not in kinds:
        return {}
    params, is_prompt = kinds["attention"].params, work.step == "mixed"
    device, dtype = engine.trial.state.packed.device, TORCH_DTYPES[engine.trial.engine.dtype]

    def tensor(heads: int, tokens: int) -> torch.Tensor:
        shape = (work.num_seqs, heads, tokens, params.head_dim)
        return torch.randn(*shape, device=device, dtype=dtype)

    query = tensor(params.num_heads, work.context_tokens if is_prompt else 1)
    caches = [tuple(tensor(params.num_kv_heads, work.context_tokens) for _ in "kv") for _ in ops]

    def attend(backends: list[SDPBackend]) -> None:
        with sdpa_kernel(backends):
            for keys, values in caches:
                F.scaled_dot_product_attention(
                    query, keys, values, is_causal=is_prompt, enable_gqa=True
                )

    return {name: partial(attend, backends) for name, backends in SDPA.items()}


def to_row(found: Measured, roofs: Roofs, stated: dict[str, object]) -> Row:
    """Give a kernel's row: µs, with rates and shares of the roofs among the conditions."""
    moved = found.bytes / found.spread.us * 1e6
    computed = found.flops / found.spread.us * 1e6
    case = f"{found.model} {found.work} {found.kernel} {found.rows} rows"
    if stated.get("kv_dtype", "auto") != "auto":
        case += f" kv {stated['kv_dtype']}"
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
    if found.missing:
        more["missing_peers"] = dict(found.missing)
    floor_s = max(found.bytes / roofs.bytes_per_s, found.flops / roofs.matmul_flops_per_s)
    us, peers = found.spread.us, dict(found.peers)
    return Row("kernels", case, us, "µs", "lower", None, 1e6 * floor_s, peers, stated | more)


def numbered(rows: Iterable[Row]) -> Iterator[Row]:
    """Number the cases that repeat: the first layer's kernels beside those of the others."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.case] = counts.get(row.case, 0) + 1
        number = counts[row.case]
        yield replace(row, case=f"{row.case} ({number})") if number > 1 else row


def summaries(
    model: str, found: list[Measured], roofs: Roofs, stated: dict[str, object]
) -> list[Row]:
    """Give the figures that goals are set for, of what was measured so far."""
    rows: list[Row] = []
    over = {"works": list(dict.fromkeys(str(one.work) for one in found))}

    def add(what: str, value: float, unit: str) -> None:
        case = f"{model} {what}"
        goal, peers = with_goal("kernels", case)
        more = stated | over
        rows.append(Row("kernels", case, value, unit, "higher", goal, None, peers, more))

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
        if one.peer in SDPA and one.work.step == "decode":
            share = one.bytes / one.spread.us * 1e6 / roofs.bytes_per_s
            add(f"decode attention {sizes}", 100 * share, "% of the read ceiling")
        elif one.peer in SDPA:
            add(f"prefill attention {sizes}", one.ratio, f"× {one.peer}")
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


def main(arguments: list[str] | None = None) -> int:
    """Time the kernels of the command line's steps, write their rows, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(CONFIGS))
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256", help="decode steps")
    parser.add_argument("--prompts", default="1x1024,8x1024,1x8192", help="prompts x tokens each")
    parser.add_argument("--context", type=int, default=1024, help="tokens before a decode step")
    parser.add_argument("--layers", type=int, default=16, help="of the model; 0 for all")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--target", default="cuda", choices=["cuda", "interpret"])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f16", "f32"])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--kv-dtype", default="auto", choices=list(KV_DTYPES))
    add_options(parser)
    began_s, asked = time.monotonic(), parser.parse_args(arguments)
    device = machine.device_of(asked.target)
    roofs = measure_roofs(device, small=device.type != "cuda")
    print(
        f"roofs: {roofs.bytes_per_s / 1e9:,.0f} GB/s, "
        f"{roofs.matmul_flops_per_s / 1e12:,.0f} TFLOP/s",
        flush=True,
    )
    stated = conditions(
        dtype=asked.dtype,
        weights="random",
        page_size=asked.page_size,
        kv_dtype=asked.kv_dtype,
        roofs=roofs.to_json(),
    )
    found: list[Measured] = []

    def measure_work(work: Workload) -> Iterator[Row]:
        def remembered() -> Iterator[Row]:
            for one in measure(
                asked.model,
                work,
                target=asked.target,
                dtype=asked.dtype,
                layers=asked.layers,
                rounds=asked.rounds,
                page_size=asked.page_size,
                kv_format=KV_DTYPES[asked.kv_dtype],
            ):
                found.append(one)
                yield to_row(one, roofs, stated)

        yield from numbered(remembered())
        if asked.kv_dtype == "auto":  # what goals are set for
            yield from summaries(asked.model, found, roofs, stated)

    works = parse_works(asked.batches, asked.prompts, asked.context)
    ends = play("kernels", [(str(w), partial(measure_work, w)) for w in works], asked, began_s)
    print_table(
        [
            ("step", "kernel", "rows", "each µs", "of the memory's roof", "of matmul's", "peers"),
            *(_cells(one, roofs) for one in found),
        ]
    )
    return ends.exit_code


def _cells(one: Measured, roofs: Roofs) -> tuple[str, ...]:
    peers = (f"{name} {us:.2f} µs ({us / one.spread.us:.2f}×)" for name, us in one.peers.items())
    return (
        str(one.work),
        f"{one.kernel} ×{one.launches}",
        str(one.rows),
        f"{one.spread.us:.2f}",
        f"{100e6 * one.bytes / one.spread.us / roofs.bytes_per_s:.0f} %",
        f"{100e6 * one.flops / one.spread.us / roofs.matmul_flops_per_s:.0f} %",
        ", ".join([*peers, *(f"no {name}: {why}" for name, why in one.missing.items())]),
    )


if __name__ == "__main__":
    sys.exit(main())
