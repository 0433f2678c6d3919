"""From logits to tokens: adjust the logits, draw a token of each sequence, count it."""

from __future__ import annotations

from treadle.ir import dims as d
from treadle.ir.ops.checks import expect, expect_ints
from treadle.ir.ops.definition import Types, define
from treadle.ir.ops.params import NoParams
from treadle.ir.types import TensorType

# Bits of a row's `adjusted`: what of the row's logits is to be adjusted.
ADJUST_COUNTS, ADJUST_BIASES, ADJUST_ALLOWED = 1, 2, 4
# Bits in a word of `allowed`.
WORD_BITS = 32


@define(
    "sample",
    NoParams,
    "logits seq_rows sample_index temperature top_k top_p min_p seed length last_token",
    "tokens",
    "anchor",
    mutates="last_token",
)
def sample(
    params: NoParams,
    logits: TensorType,
    seq_rows: TensorType,
    sample_index: TensorType,
    temperature: TensorType,
    top_k: TensorType,
    top_p: TensorType,
    min_p: TensorType,
    seed: TensorType,
    length: TensorType,
    last_token: TensorType,
) -> Types:
    """Choose the next token of each sequence and note it as its row's last token.

    Formula: greedy at temperature 0; else one uniform number per (seed, position) drawn through the
    inverse of the distribution that top-k, then top-p, then min-p leave.
    Shapes: logits f32[B, V]; sample_index i32[B], -1 where no token is wanted; row state [R];
    tokens i32[B], -1 where none is wanted, -2 where the logits hold NaN.
    """
    expect_ints("sample", seq_rows=(seq_rows, (d.B,)), sample_index=(sample_index, (d.B,)))
    expect(logits.dtype == "f32" and len(logits.shape) == 2, "sample", "logits f32[B, V]", logits)
    return (TensorType((d.B,), "i32"),)


_ADJUSTMENTS = (
    "adjusted num_biases bias_tokens bias_values bias_stops "
    "repetition_penalty presence_penalty frequency_penalty token_counts allowed"
)


@define(
    "adjust_logits",
    NoParams,
    f"logits seq_rows sample_index length {_ADJUSTMENTS}",
    "",
    "anchor",
    mutates="logits",
)
def adjust_logits(
    params: NoParams,
    logits: TensorType,
    seq_rows: TensorType,
    sample_index: TensorType,
    length: TensorType,
    adjusted: TensorType,
    num_biases: TensorType,
    bias_tokens: TensorType,
    bias_values: TensorType,
    bias_stops: TensorType,
    repetition_penalty: TensorType,
    presence_penalty: TensorType,
    frequency_penalty: TensorType,
    token_counts: TensorType,
    allowed: TensorType,
) -> Types:
    """Change the logits as their rows ask: biases, then penalties, then the allowed tokens.

    Formula: x += value of each of the first num_biases entries whose token this is, while
    length < stop; c = token_counts; x = (x / repetition if x > 0 else x * repetition) if c > 0;
    x -= frequency * (c >> 1) + presence * (c > 1); x = -inf unless bit v % 32 of allowed[v // 32]
    is set. Only what the bits of `adjusted` name: 1 penalties, 2 biases, 4 allowed tokens.
    Shapes: logits f32[B, V], changed in place where sample_index i32[B] is not negative; biases
    [R, K]; token_counts i16[R, V], twice the times that a token was generated, plus 1 if the prompt
    has it; allowed i32[R, ceil(V / 32)]; the other row state [R].
    Source: Keskar et al., CTRL, 2019 (repetition); OpenAI's API reference (the others).
    """
    kind = "adjust_logits"
    expect_ints(
        kind,
        seq_rows=(seq_rows, (d.B,)),
        sample_index=(sample_index, (d.B,)),
        length=(length, (d.R,)),
        adjusted=(adjusted, (d.R,)),
        num_biases=(num_biases, (d.R,)),
        bias_tokens=(bias_tokens, bias_values.shape),
        bias_stops=(bias_stops, bias_values.shape),
    )
    expect(logits.dtype == "f32" and len(logits.shape) == 2, kind, "logits f32[B, V]", logits)
    vocab = logits.size(1)
    expect(token_counts == TensorType((d.R, vocab), "i16"), kind, "i16[R, V]", token_counts)
    words = -(-vocab // WORD_BITS)
    expect(allowed == TensorType((d.R, words), "i32"), kind, f"i32[R, {words}]", allowed)
    return ()


@define(
    "count_tokens",
    NoParams,
    "tokens seq_rows adjusted token_counts",
    "",
    "anchor",
    mutates="token_counts",
)
def count_tokens(
    params: NoParams,
    tokens: TensorType,
    seq_rows: TensorType,
    adjusted: TensorType,
    token_counts: TensorType,
) -> Types:
    """Count the tokens that were drawn, in the rows whose penalties need the counts.

    Formula: token_counts[row, token] += 2, unless token < 0, row < 0 or bit 1 of adjusted is unset
    Shapes: tokens, seq_rows i32[B], no row twice; adjusted i32[R]; token_counts i16[R, V].
    Numerics: a count stays at the most that i16 holds, 16383 times.
    """
    expect_ints(
        "count_tokens",
        tokens=(tokens, (d.B,)),
        seq_rows=(seq_rows, (d.B,)),
        adjusted=(adjusted, (d.R,)),
    )
    expect(token_counts.dtype == "i16", "count_tokens", "token_counts i16[R, V]", token_counts)
    return ()
