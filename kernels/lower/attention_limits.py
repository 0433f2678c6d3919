"""The hook lines of what limits attention: a window, a soft cap of scores, sinks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.ir.ops.attention import AttentionParams
from treadle.kernels.epilogue import soft_cap


def limits_suffix(params: AttentionParams, sinks: Sequence[str]) -> str:
    """Write what a kernel's name says of limits."""
    known = (("_window", params.window), ("_cap", params.soft_cap), ("_sinks", sinks))
    return "".join(suffix for suffix, is_on in known if is_on)


def limit_hooks(
    params: AttentionParams, step: str, sinks: Sequence[str], *, is_quantised: bool
) -> dict[str, tuple[str, ...]]:
    """Write the lines of a window, of a soft cap and of sinks; none where there is none."""
    # Scores are scaled later, but for those of a decode step with a quantised cache, which are
    # in units of log2.
    in_log2 = is_quantised and step == "decode"
    scores = _cap_lines(params, params.scale if not in_log2 else math.log(2.0))
    window, newest = params.window, "context" if step == "decode" else "positions[:, None] + 1"
    if window:
        scores += (
            "# Not infinite: a row may see nothing of its first tiles.",
            f"seen = tokens[None, :] >= {newest} - {window}",
            "scores = tl.where(seen, scores, -1.0e30)",
        )
    lines: tuple[str, ...] = ()
    if sinks and step == "decode":
        lines = (
            *_sink_lines("kv_head * GROUP_HEADS + heads, mask=heads < GROUP_HEADS, other=0.0"),
            "best = tl.where(split == 0, sink, best)  # [BLOCK_H]",
            "total += tl.where(split == 0, 1.0, 0.0)  # [BLOCK_H]",
        )
    elif sinks:
        lines = (
            *_sink_lines("heads"),
            "best = tl.zeros_like(best) + sink  # [BLOCK_ROWS]",
            "total += 1.0  # [BLOCK_ROWS]",
        )
    hooks = {"FIRST_PAGE": _page_lines(params, step), "SCORES": scores, "SINKS": lines}
    if not is_quantised or step == "decode":
        return hooks
    own: tuple[str, ...] = ()
    if window:
        first = f"tl.maximum(first_query + 1 - {window}, 0)"
        own = (f"first_own = {first} // BLOCK_TOKENS * BLOCK_TOKENS",)
    return {**hooks, "FIRST_OWN": own}


def _page_lines(params: AttentionParams, step: str) -> tuple[str, ...]:
    if not params.window:
        return ()
    first = "context" if step == "decode" else "context - num_queries + first_query + 1"
    return (
        f"# Whole pages before the window of {params.window} tokens are left out.",
        f"skipped = tl.maximum({first} - {params.window}, 0) // PAGE_SIZE",
        "context -= skipped * PAGE_SIZE",
        "block_table_ptr += skipped",
    )


def _cap_lines(params: AttentionParams, unit: float) -> tuple[str, ...]:
    """Write the lines of a cap for scores of which 1 stands for `unit`."""
    if not params.soft_cap:
        return ()
    capped = soft_cap("scores", params.soft_cap / unit)
    return (
        f"# a score s counts as {params.soft_cap!r} tanh(s / {params.soft_cap!r})",
        f"scores = {capped}",
    )


def _sink_lines(where: str) -> tuple[str, ...]:
    return (
        "# The sink is one more score, whose value is zero.",
        f"sink = tl.load(sinks_ptr + {where})",
        "sink = sink.to(tl.float32) * 1.4426950408889634",
    )


def rope_limit_hooks(params: AttentionParams, sinks: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Write the lines of limits for a kernel whose softmax begins with the newest token."""
    live: tuple[str, ...] = ()
    if params.window:
        live = (f"live &= tokens >= context - {params.window}",)
    lines: tuple[str, ...] = ()
    if sinks:
        lines = (
            *_sink_lines("kv_head * GROUP_HEADS + heads, mask=heads < GROUP_HEADS, other=0.0"),
            'sink = tl.where(split == 0, sink, float("-inf"))  # [BLOCK_H]',
            "new_best = tl.maximum(best, sink)  # [BLOCK_H]",
            "rescale = tl.exp2(best - new_best)  # [BLOCK_H]",
            "acc = acc * rescale[:, None]  # [BLOCK_H, BLOCK_D]",
            "total = total * rescale + tl.exp2(sink - new_best)  # [BLOCK_H]",
            "best = new_best  # [BLOCK_H]",
        )
    pages = _page_lines(params, "decode")
    return {
        "FIRST_PAGE": pages,
        "LIVE": live,
        "SCORES": _cap_lines(params, params.scale),
        "SINKS": lines,
    }
