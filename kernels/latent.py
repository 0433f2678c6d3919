"""Latent attention → kernels: its append, its attentions, and the products of each head.

The part of lowering that knows latents, with the schedules of their templates. Called by
`lower.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from treadle.ir.errors import LoweringError
from treadle.ir.graph import Graph, Op
from treadle.ir.types import DTYPE_BYTES
from treadle.kernels.candidates import Candidate, Scratch, Situation
from treadle.kernels.emit import Fact
from treadle.kernels.schedule import (
    HAS_TMA,
    INTERPRETER,
    NUM_MULTIPROCESSORS,
    Schedule,
    pdl_choices,
    power_of_two,
    shared_room_bytes,
)

# --- products of each head ------------------------------------------------------------------------


def lower_head_linear(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower a product of each head with its own rows of a weight."""
    x, weight = op.inputs
    params, weight_type = op.params, graph.type_of(weight)
    shape: dict[str, Fact] = {
        "NUM_HEADS": params.num_heads,
        "X_DIM": graph.type_of(x).size(-1) // params.num_heads,
        "WEIGHT_ROWS": weight_type.size(0) // params.num_heads,
        "FIRST": params.first,
        "ROWS": params.rows,
        "K": weight_type.size(1),
        "TRANSPOSED": params.transposed,
    }
    num_inputs, num_outputs = weight_type.size(1), params.rows
    if params.transposed:
        num_inputs, num_outputs = num_outputs, num_inputs
    arguments = {
        "x": f"value:{x}",
        "w": f"value:{weight}",
        "y": f"value:{op.outputs[0]}",
        "num_tokens": "size:T",
    }
    sizes = (num_inputs, num_outputs, DTYPE_BYTES[weight_type.dtype])
    for schedule in _head_linear_schedules(*sizes, params.num_heads, where):
        yield Candidate("head_linear", "head_linear", shape, schedule, arguments)


def _head_linear_schedules(
    num_inputs: int, num_outputs: int, element_bytes: int, num_heads: int, where: Situation
) -> Iterator[Schedule]:
    """Yield schedules: for few tokens blocks of features small enough to fill the GPU."""
    rows, machine = where.dims["T"], where.machine
    widest, deepest = (max(16, power_of_two(size)) for size in (num_outputs, num_inputs))
    if machine == INTERPRETER:
        block_m = max(16, min(power_of_two(rows), 64))
        yield _product(block_m, min(widest, 512), min(deepest, 512), 4, 1)
        return
    if rows <= 32:
        block_m = 16 if rows <= 16 else 32
        filling = [n for n in (128, 64, 32) if -(-num_outputs // n) * num_heads >= 128]
        blocks_n = dict.fromkeys([*filling, 32, 16, 64])
        shapes = [(block_m, n, 128, 4 if n >= 64 else 2, 2) for n in blocks_n]
        shapes += [(block_m, n, 64, 4, 4) for n in blocks_n]
    else:
        shapes = [(64, 128, 64, 4, 3), (128, 128, 64, 8, 3), (64, 64, 64, 4, 4)]
        shapes += [(32, 128, 64, 4, 3)] if rows <= 128 else [(128, 256, 64, 8, 3)]
    for block_m, block_n, block_k, warps, stages in shapes:
        block_n = min(block_n, widest)
        block_k = min(block_k * 2 // element_bytes, deepest)
        tile_bytes = (block_m + block_n) * block_k * element_bytes
        stages = max(1, min(stages, shared_room_bytes(machine) // tile_bytes))
        for use_pdl in pdl_choices(machine):
            schedule = _product(block_m, block_n, block_k, warps, stages)
            for prefetch in (True, False) if use_pdl and rows <= 32 else (False,):
                yield schedule | {"USE_PDL": use_pdl, "PREFETCH": prefetch}


def _product(block_m: int, block_n: int, block_k: int, warps: int, stages: int) -> Schedule:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "USE_PDL": False,
        "PREFETCH": False,
        "num_warps": warps,
        "num_stages": stages,
    }


# --- attention ------------------------------------------------------------------------------------


def lower_latent_attention(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower attention to latents: split over the context in decode steps, by rows in others."""
    q, q_rope, latents, block_table, seq_rows, query_start, context_lens = op.inputs
    params, cache = op.params, graph.type_of(latents)
    shape: dict[str, Fact] = {
        "NUM_HEADS": params.num_heads,
        "VALUE_DIM": params.value_dim,
        "ROPE_DIM": cache.size(3) - params.value_dim,
        "Q_DIM": graph.type_of(q_rope).size(-1) // params.num_heads,
        "PAGE_SIZE": cache.size(2),
        "SCALE": params.scale,
    }
    arguments = {
        "q": f"value:{q}",
        "q_rope": f"value:{q_rope}",
        "latents": f"latents:{latents}",
        "block_table": f"value:{block_table}",
        "seq_rows": f"value:{seq_rows}",
        "context_lens": f"value:{context_lens}",
        "out": f"value:{op.outputs[0]}",
        "num_seqs": "size:B",
    }
    element_bytes = DTYPE_BYTES[cache.dtype]
    if where.step != "decode":
        shape |= {"WHOLE_FROM": params.whole_from}
        arguments |= {"query_start": f"value:{query_start}", "num_tokens": "size:T"}
        name = "latent_attention_prefill"
        for schedule in _prefill_schedules(element_bytes, where.machine):
            yield Candidate(name, name, shape, schedule, arguments)
        return
    name = "latent_attention_decode"
    for schedule in _decode_schedules(params.num_heads, element_bytes, where.dims, where.machine):
        block_heads = int(schedule["BLOCK_HEADS"])
        groups = where.dims["B"] * -(-params.num_heads // block_heads)
        partials = groups * block_heads * int(schedule["MAX_SPLITS"])
        scratch = (
            Scratch("partial_out", "f32", partials * params.value_dim),
            Scratch("partial_lse", "f32", partials),
            Scratch("counters", "i32", groups),
        )
        named = {each.name: f"scratch:{each.name}" for each in scratch}
        yield Candidate(name, name, shape, schedule, {**arguments, **named}, scratch)


def _decode_schedules(
    num_heads: int, element_bytes: int, dims: Mapping[str, int], machine: str
) -> Iterator[Schedule]:
    """Yield schedules of decode attention: more splits the fewer sequences fill the GPU.

    A block of 64 heads by 512 features of f32 sums does not fit registers without spills.
    """
    if machine == INTERPRETER:
        yield _decode(max(16, min(power_of_two(num_heads), 64)), 64, 2, 64, 4, 1)
        return
    if element_bytes == 4:
        shapes = [(16, 16, 8, 1)]
    elif machine == "gfx942":  # 64 KiB of shared memory hold one tile of 32 latents
        shapes = [(16, 32, 4, 2), (16, 32, 8, 2), (16, 32, 4, 1)]
    else:
        shapes = [(16, 64, 4, 2), (16, 32, 4, 3), (16, 64, 8, 2), (16, 32, 4, 2), (16, 32, 8, 3)]
        if num_heads > 16:
            shapes = [(32, 32, 8, 2), (32, 64, 8, 2), *shapes[:3], (64, 32, 8, 2)]
    for index, (block_heads, block_tokens, warps, stages) in enumerate(shapes):
        programs = dims["B"] * -(-num_heads // block_heads)
        longest = power_of_two(-(-dims["C"] // 128))
        splits = max(1, min(power_of_two(2 * NUM_MULTIPROCESSORS // programs), longest, 32))
        several = [splits, max(1, splits // 2), splits * 2] if index < 2 else [splits]
        for number in dict.fromkeys(several):
            for use_pdl in pdl_choices(machine)[: 2 if number == splits else 1]:
                schedule = _decode(block_heads, block_tokens, number, 128, warps, stages)
                yield schedule | {"USE_PDL": use_pdl}
        if programs > NUM_MULTIPROCESSORS and index == 0:
            # Sequences of uneven length: the long ones alone are cut.
            for number, chunk in ((4, 512), (8, 1024)):
                schedule = _decode(block_heads, block_tokens, number, chunk, warps, stages)
                yield schedule | {"USE_PDL": machine in HAS_TMA}


def _decode(
    block_heads: int, block_tokens: int, splits: int, chunk: int, warps: int, stages: int
) -> Schedule:
    return {
        "BLOCK_HEADS": block_heads,
        "BLOCK_TOKENS": block_tokens,
        "MAX_SPLITS": splits,
        "MIN_CHUNK_TOKENS": chunk,
        "USE_PDL": False,
        "num_warps": warps,
        "num_stages": stages,
    }


def _prefill_schedules(element_bytes: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of attention for many tokens: the sums of 64 rows spill some registers."""
    shapes = [(32, 64, 8, 2), (32, 32, 8, 2), (64, 32, 8, 2), (16, 32, 4, 2), (64, 64, 8, 2)]
    if machine == INTERPRETER:
        shapes = [(64, 64, 4, 1)]
    elif element_bytes == 4:
        shapes = [(16, 16, 8, 1)]
    elif machine == "gfx942":
        shapes = [(32, 32, 4, 2), (16, 32, 4, 2)]
    elif machine == "sm_80":
        shapes = shapes[:4]
    for block_rows, block_tokens, warps, stages in shapes:
        yield {
            "BLOCK_ROWS": block_rows,
            "BLOCK_TOKENS": block_tokens,
            "num_warps": warps,
            "num_stages": stages,
        }


def lower_prompt_attention(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower attention within prompts that begin in the step."""
    q, kv, latents, block_table, seq_rows, query_start, context_lens, y = op.inputs
    params, cache = op.params, graph.type_of(latents)
    rope_dim = graph.type_of(q).size(-1) // params.num_heads - params.nope_dim
    shape: dict[str, Fact] = {
        "NUM_HEADS": params.num_heads,
        "NOPE_DIM": params.nope_dim,
        "ROPE_DIM": rope_dim,
        "VALUE_DIM": params.value_dim,
        "LATENT_DIM": cache.size(3) - rope_dim,
        "WHOLE_FROM": params.whole_from,
        "PAGE_SIZE": cache.size(2),
        "SCALE": params.scale,
    }
    arguments = {
        "q": f"value:{q}",
        "kv": f"value:{kv}",
        "latents": f"latents:{latents}",
        "block_table": f"value:{block_table}",
        "seq_rows": f"value:{seq_rows}",
        "query_start": f"value:{query_start}",
        "context_lens": f"value:{context_lens}",
        "out": f"value:{y}",
        "num_tokens": "size:T",
        "num_seqs": "size:B",
    }
    for schedule in _prompt_schedules(DTYPE_BYTES[cache.dtype], where.machine):
        yield Candidate("prompt_attention", "latent_attention_prompts", shape, schedule, arguments)


def _prompt_schedules(element_bytes: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of attention within prompts: those that don't spill first."""
    shapes = [(128, 32, 8, 2), (64, 32, 4, 2), (128, 64, 8, 2), (64, 64, 4, 2)]
    if machine == INTERPRETER:
        shapes = [(64, 64, 4, 1)]
    elif element_bytes == 4:
        shapes = [(32, 16, 4, 1)]
    elif machine == "sm_90":  # wgmma keeps operands in shared memory: wider tiles fit registers
        shapes = [(128, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 3), (128, 32, 8, 2)]
    for block_queries, block_tokens, warps, stages in shapes:
        yield {
            "BLOCK_QUERIES": block_queries,
            "BLOCK_TOKENS": block_tokens,
            "num_warps": warps,
            "num_stages": stages,
        }


# --- the append -----------------------------------------------------------------------------------


def lower_latent_write(op: Op, graph: Graph, where: Situation) -> Iterator[Candidate]:
    """Lower split + norm of the latent + ropes of q and of the key + append.

    Raises: LoweringError: other ops surround the append.
    """
    made = {name: inner for inner in op.plain for name in inner.outputs}
    kinds = sorted(inner.kind for inner in op.plain)
    if kinds != ["latent_write", "rms_norm", "rope", "rope", "split"]:
        raise LoweringError(
            f"`{op.name}`: latents are appended together with the norm and the ropes before; found "
            f"{', '.join(kinds)} alone.",
            remedy="`explain` says why they were not joined (`fuse_latent_write`).",
        )
    write = op.plain[-1]
    norm, rope_k = made[write.inputs[0]], made[write.inputs[1]]
    (rope_q,) = (each for each in op.plain if each.kind == "rope" and each is not rope_k)
    split = made[norm.inputs[0]]
    width = graph.type_of(split.inputs[0]).size(-1)
    sizes = split.params.sizes
    starts = {name: sum(sizes[:index]) for index, name in enumerate(split.outputs)}
    latent, key, q = norm.inputs[0], rope_k.inputs[0], rope_q.inputs[0]
    latent_dim, rotary_dim = graph.type_of(latent).size(-1), graph.type_of(key).size(-1)
    k_params, q_params = rope_k.params, rope_q.params
    _, positions, table = rope_k.inputs
    is_plain = k_params.head_dim == rotary_dim == graph.type_of(table).size(-1)
    if not is_plain or k_params.interleaved != q_params.interleaved:
        raise LoweringError(
            f"`{op.name}`: one kernel rotates the key as a whole, and q alike; found "
            f"{k_params} and {q_params}."
        )
    if starts.get(key) != starts[latent] + latent_dim:
        raise LoweringError(f"`{op.name}`: the key's rotated part should follow the latent.")
    q_in = split.inputs[0] if q in starts else q
    shape: dict[str, Fact] = {
        "NUM_HEADS": graph.type_of(q).size(-1) // q_params.head_dim,
        "HEAD_DIM": q_params.head_dim,
        "Q_START": q_params.start,
        "Q_STRIDE": graph.type_of(q_in).size(-1),
        "Q_OFFSET": starts.get(q, 0),
        "KV_STRIDE": width,
        "KV_OFFSET": starts[latent],
        "LATENT_DIM": latent_dim,
        "ROTARY_DIM": rotary_dim,
        "INTERLEAVED": q_params.interleaved,
        "STORE_LATENT": norm.outputs[0] in op.outputs,
        "PAGE_SIZE": graph.type_of(write.inputs[-1]).size(2),
        "EPS": norm.params.eps,
        "OFFSET": norm.params.offset,
    }
    _, _, _, token_seq, seq_rows, block_table, latents = write.inputs
    arguments = {
        "q_in": f"value:{q_in}",
        "kv": f"value:{split.inputs[0]}",
        "weight": f"value:{norm.inputs[1]}",
        "positions": f"value:{positions}",
        "cos_sin": f"value:{table}",
        "token_seq": f"value:{token_seq}",
        "seq_rows": f"value:{seq_rows}",
        "block_table": f"value:{block_table}",
        "latents": f"latents:{latents}",
        "q": f"value:{rope_q.outputs[0]}",
        "latent": f"value:{norm.outputs[0]}" if shape["STORE_LATENT"] else "none:",
        "num_tokens": "size:T",
    }
    for schedule in _write_schedules(int(shape["NUM_HEADS"]), where.machine):
        yield Candidate("latent_write", "latent_write", shape, schedule, arguments)


def _write_schedules(num_heads: int, machine: str) -> Iterator[Schedule]:
    """Yield schedules of the append: a few query heads a program, and the latent one more."""
    shapes = [(4, 2), (8, 4), (2, 1)]
    if machine == INTERPRETER:
        shapes = [(power_of_two(num_heads), 2)]
    for block_heads, warps in shapes:
        for use_pdl in pdl_choices(machine):
            yield {
                "BLOCK_HEADS": block_heads,
                "USE_PDL": use_pdl,
                "num_warps": warps,
                "num_stages": 1,
            }
