"""Lower attention to latents, attention within prompts, and the append of latents."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.ir.errors import LoweringError
from treadle.ir.graph import Graph, Op
from treadle.ir.types import DTYPE_BYTES
from treadle.kernels.emit import Fact
from treadle.kernels.lower.candidates import Candidate, Scratch, Situation
from treadle.kernels.schedule.latent_attention import (
    latent_decode_schedules,
    latent_prefill_schedules,
    latent_write_schedules,
    prompt_attention_schedules,
)


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
        for schedule in latent_prefill_schedules(element_bytes, where.machine):
            yield Candidate(name, name, shape, schedule, arguments)
        return
    name = "latent_attention_decode"
    for schedule in latent_decode_schedules(
        params.num_heads, element_bytes, where.dims, where.machine
    ):
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
    for schedule in prompt_attention_schedules(DTYPE_BYTES[cache.dtype], where.machine):
        yield Candidate("prompt_attention", "latent_attention_prompts", shape, schedule, arguments)


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
    for schedule in latent_write_schedules(int(shape["NUM_HEADS"]), where.machine):
        yield Candidate("latent_write", "latent_write", shape, schedule, arguments)
