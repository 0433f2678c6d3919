"""Play requests through the scheduler alone and see how it admits them; needs no GPU and no model.

Run: python bench/admission.py --requests 512
Steps compute nothing: an answer ends when it is told to. Each case is played by the rule that was
there before, a request starts when its prompt's pages fit and one page more for each that runs;
with the scheduler's forecast; with decodes of much context and prompts in turns, too; and with
decode programs kept full. Seconds are reckoned by what steps of an 8B model cost on an H200.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import numpy as np  # noqa: E402

from treadle.runtime.admission import Admission, Newcomer, Running  # noqa: E402
from treadle.runtime.pages import PagePool  # noqa: E402
from treadle.runtime.request import SamplingParams  # noqa: E402
from treadle.runtime.scheduler import Scheduler  # noqa: E402
from treadle.runtime.steps import StepPlan  # noqa: E402

EOS, OTHER = 0, 1
PAGE_SIZE, MAX_ROWS, MAX_STEP_TOKENS, WINDOW = 64, 256, 8192, 8192
# The rest of a decode step, by the rows of its program; a prompt's token.
PROGRAM_MS = {8: 3.8, 16: 4.2, 32: 4.2, 64: 4.6, 128: 5.0, 256: 7.1}
PROMPT_TOKEN_MS = 0.0228
WORTHWHILE_ROWS = {128: 188}  # as `find_worthwhile_rows` finds; others are worth one row more


@dataclass(frozen=True)
class ContextCost:
    """What a token of context costs a decode step to read, and a step that has prompts too.

    `most_mixed_tokens`: with more of them decodes and prompts take turns.
    """

    token_ms: float
    mixed_token_ms: float
    most_mixed_tokens: int


# As measured; a third of the weights' bytes in keys and values.
BF16, INT8 = ContextCost(30e-6, 165e-6, 40_800), ContextCost(17.5e-6, 90e-6, 78_600)
ROWS_AT_ONCE = 16  # of 8 KV heads, on 132 multiprocessors
BF16_PAGES, INT8_PAGES = 2560, 4927  # of 20 GiB


@dataclass(frozen=True)
class Wanted:
    """A request: tokens of its prompt, its limit, and the tokens after which it ends by itself.

    ends_at 0: nothing but the limit ends it, and the scheduler knows.
    """

    prompt_tokens: int
    max_tokens: int
    ends_at: int = 0


@dataclass(frozen=True)
class Played:
    """What a case took: `running` has an entry per step; `recomputed` counts tokens."""

    preemptions: int
    recomputed: int
    steps: int
    mean_batch: float
    seconds: float
    tokens: int
    running: Sequence[int]


class PromptsFit(Admission):
    """The rule before there was a forecast."""

    def find_wait(
        self,
        newcomer: Newcomer,
        running: Running,
        *,
        available: int,
        claimed: int,
        num_waiting: int,
        step: int,
    ) -> int:
        """Let it start when its pages are there, and one for each that needs more yet."""
        growing = int(np.count_nonzero(running.capacities < running.last_positions))
        return int(newcomer.new_pages + growing > available)


def simulate(
    wanted: Sequence[Wanted],
    *,
    num_pages: int,
    concurrency: int = MAX_ROWS,
    cost: ContextCost = BF16,
    looks_ahead: bool = True,
    takes_turns: bool = True,
    stays_full: bool = True,
) -> Played:
    """Play requests, so many at a time, two steps in flight as on a GPU."""
    scheduler = Scheduler(
        PagePool(num_pages, PAGE_SIZE),
        max_rows=MAX_ROWS,
        max_step_tokens=MAX_STEP_TOKENS,
        max_model_len=WINDOW,
        eos_token_ids=[EOS],
        max_mixed_context_tokens=cost.most_mixed_tokens if takes_turns else math.inf,
        rows_at_once=ROWS_AT_ONCE,
        worthwhile_rows=WORTHWHILE_ROWS if stays_full else None,
    )
    if not looks_ahead:
        scheduler.admission = PromptsFit(
            max_rows=MAX_ROWS, num_pages=num_pages, page_size=PAGE_SIZE
        )
    waiting, ends = deque(enumerate(wanted)), dict[str, int]()
    in_flight, running = deque[StepPlan](), list[int]()
    milliseconds, num_decodes, num_prompt_tokens = 0.0, 0, 0
    while True:
        while waiting and len(scheduler.live_request_ids) < concurrency:
            number, each = waiting.popleft()
            # No two alike: the prefix cache finds nothing.
            prompt = range(2 + number * WINDOW, 2 + number * WINDOW + each.prompt_tokens)
            params = SamplingParams(max_tokens=each.max_tokens, ignore_eos=not each.ends_at)
            ends[scheduler.add(str(number), prompt, params).request_id] = each.ends_at
        while scheduler.num_in_flight < 2 and (plan := scheduler.schedule()):
            in_flight.append(plan)
            computed = plan.num_tokens - plan.num_decode
            num_prompt_tokens += computed
            num_decodes += plan.num_decode
            milliseconds += find_step_ms(plan, cost)
            running.append(scheduler.num_running)
        if not in_flight:
            break
        plan = in_flight.popleft()
        tokens = [
            EOS if sequence.num_generated + 1 == ends[sequence.request_id] else OTHER
            for sequence in (*plan.decodes, *(chunk.sequence for chunk in plan.chunks))
        ]
        scheduler.complete(plan, tokens)
    return Played(
        preemptions=scheduler.preemptions_total,
        recomputed=num_prompt_tokens - sum(each.prompt_tokens for each in wanted),
        steps=scheduler.steps_total,
        mean_batch=num_decodes / scheduler.steps_total,
        seconds=milliseconds / 1e3,
        tokens=scheduler.generation_tokens_total,
        running=running,
    )


def find_step_ms(plan: StepPlan, cost: ContextCost) -> float:
    """Reckon what a step takes: one of decodes reads weights, one of prompts computes."""
    context_tokens = float(plan.starts.sum())
    if plan.is_decode_only:
        program_ms = next(ms for rows, ms in PROGRAM_MS.items() if rows >= plan.num_decode)
        return program_ms + context_tokens * cost.token_ms
    prompts_ms = max(PROGRAM_MS[8], plan.num_tokens * PROMPT_TOKEN_MS)
    return prompts_ms + context_tokens * cost.mixed_token_ms


def cases(count: int, draw: random.Random) -> dict[str, tuple[list[Wanted], int, ContextCost]]:
    """Give the requests of each case, the pages of its pool, and what its context costs."""

    def lengths(least: int, most: int) -> list[int]:
        return [draw.randint(least, most) for _ in range(count)]

    fixed = [Wanted(1024, 1024)] * count
    limits = [Wanted(1024, 1024, 2000)] * count
    chat = [
        Wanted(prompt, 6500, 1 + min(6400, int(draw.expovariate(1 / 300))))
        for prompt in lengths(50, 1500)
    ]
    mixed = [
        Wanted(prompt, answer)
        for prompt, answer in zip(lengths(100, 1900), lengths(100, 1900), strict=True)
    ]
    short = [Wanted(200, 4096, length) for length in lengths(20, 80)]
    two = [Wanted(prompt, 4096, draw.choice([50, 5000])) for prompt in lengths(50, 1500)]
    return {
        "1024 + 1024, bf16": (fixed, BF16_PAGES, BF16),
        "1024 + 1024, int8": (fixed, INT8_PAGES, INT8),
        "1024 + 1024, as far as known less, bf16": (limits, BF16_PAGES, BF16),
        "100 to 1900 + 100 to 1900": (mixed, BF16_PAGES, BF16),
        "chat: limit 6500, mean 300": (chat, BF16_PAGES, BF16),
        "limit 4096, 20 to 80, 640 pages": (short, 640, BF16),
        "limit 4096, 50 or all of it": (two, BF16_PAGES, BF16),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the cases of the command line with both rules, print a line each, give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=MAX_ROWS)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    for name, (wanted, num_pages, cost) in cases(asked.requests, random.Random(asked.seed)).items():
        print(name, flush=True)
        for rule, looks_ahead, takes_turns, stays_full in (
            ("prompts fit", False, False, False),
            ("forecast", True, False, False),
            ("and in turns", True, True, False),
            ("and full", True, True, True),
        ):
            played = simulate(
                wanted,
                num_pages=num_pages,
                concurrency=asked.concurrency,
                cost=cost,
                looks_ahead=looks_ahead,
                takes_turns=takes_turns,
                stays_full=stays_full,
            )
            print(
                f"  {rule:12} {played.preemptions:5} preemptions, {played.recomputed:7} tokens "
                f"again, {played.steps:6} steps, mean batch {played.mean_batch:5.1f}, "
                f"{played.seconds:6.1f} s, {played.tokens / played.seconds:6.0f} tokens/s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
