"""Real weights: greedy answers of SmolLM2-135M-Instruct are those of transformers, in float32."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoints import find_demo_model, load_oracle, oracle_greedy
from tests.runtime.serving import answer, answers, compile_tiny, serving
from treadle.kernels.reference.linears import can_pack_float16

NUM_TOKENS = 24
# Around the page size of 16 and the step size of 64, and beyond both.
LENGTHS = (1, 2, 3, 5, 7, 11, 15, 16, 17, 23, 31, 33, 48, 63, 64, 65, 97, 128, 160, 200)
TEXT = """\
The loom stood in the corner of the workshop where it had stood for ninety years, and every \
morning before the first train went by, old Marguerite swept the floor around it. She had \
learned to weave from her aunt, who had learned it from a travelling merchant, who claimed to \
have learned it from nobody at all. A good cloth, the aunt used to say, is made of three \
things: patience, straight threads, and a window that faces north. In the year of the great \
flood the river rose as high as the treadles. The neighbours carried the bales upstairs, 412 of \
them, and counted them twice; then they waited for nine days. When the water fell, Marguerite \
found a small fish in the drawer where she kept her needles. Why it had chosen that drawer, she \
wrote to her sister in Lyon, is a question for the philosophers. What she wanted to know was \
something else: "How does one dry a loom without bending the beams?" Her sister answered by \
return of post. First, open all doors. Second, light no fire. Third, take the warp off and wash \
it in clear water with a spoon of vinegar. The letter ended with a recipe for plum tart, a list \
of prices (wool 3.20, flax 1.75, silk not to be had), and these words."""


@dataclass(frozen=True)
class Expected:
    """Hold prompts and what transformers answers to each alone."""

    model: Path
    prompts: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Ask transformers; each prompt begins at another word of the text.

    From these words on no answer comes closer to a tie of two tokens than a logit of 0.004, where
    the engine's differences between logits are within 0.00003 of those of transformers.
    """
    model = find_demo_model()
    oracle = load_oracle(model.parent, model.name)
    oracle.generation_config.eos_token_id = None
    artifact = compile_tiny(model, tmp_path_factory.mktemp("prompts") / "artifact")

    async def encode() -> list[int]:
        async with serving(artifact) as engine:
            return engine.tokenizer.encode(TEXT, add_special_tokens=False)

    ids = asyncio.run(encode())
    starts = range(7, 7 + 2 * len(LENGTHS), 2)
    prompts = [ids[s : s + length] for s, length in zip(starts, LENGTHS, strict=True)]
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    found = [oracle_greedy(oracle, prompt, NUM_TOKENS) for prompt in prompts]
    return Expected(model, prompts, found)


@pytest.mark.slow
@pytest.mark.parametrize("weight_dtype", ["auto", "float16"])
def test_prompts_of_different_lengths_together_answer_as_in_transformers(
    expected: Expected, tmp_path: Path, weight_dtype: str
) -> None:
    """Rounding the weights to float16 moves no answer over its closest tie."""
    if weight_dtype == "float16" and not can_pack_float16():
        pytest.skip("torch has no FBGEMM here")
    artifact = compile_tiny(
        expected.model, tmp_path / "artifact", max_rows=len(LENGTHS), max_step_tokens=64
    )

    async def run() -> list[list[int]]:
        async with serving(artifact, prefix_cache=False, weight_dtype=weight_dtype) as engine:
            found = await answers(
                engine, expected.prompts, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True
            )
            return [list(delta.token_ids) for delta in found]

    assert asyncio.run(run()) == expected.answers


@pytest.mark.slow
def test_each_prompt_alone_answers_as_in_transformers(expected: Expected, tmp_path: Path) -> None:
    artifact = compile_tiny(expected.model, tmp_path / "artifact", max_step_tokens=512)

    async def run() -> list[list[int]]:
        async with serving(artifact, prefix_cache=False) as engine:
            found = []
            for prompt in expected.prompts:
                delta = await answer(
                    engine, prompt, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True
                )
                found.append(list(delta.token_ids))
            return found

    assert asyncio.run(run()) == expected.answers
