"""Play the requests of `throughput.py` with transformers: the peers that any machine can have.

Run: python bench/baselines.py --model-path DIR --shapes 1024x1024,mix --concurrency 64 --json FILE
Two ways: `generate` with a static cache, which transformers compiles with torch on a GPU, over
batches of equal lengths; and its continuous batching. FILE gets output tokens a second by case and
peer after each; a peer that can't play a case is told with the reason and left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT / ".import"), *[p for p in sys.path if Path(p or ".").resolve() != ROOT]]

import torch  # noqa: E402
import transformers  # noqa: E402

from treadle.bench import workloads  # noqa: E402
from treadle.ir.files import write_whole  # noqa: E402

VERSION = transformers.__version__
NO_TOKEN = -1  # ends no answer


class UnfitError(Exception):
    """A peer can't play a case; says why."""


@torch.inference_mode()
def play_static(model: Any, shape: str, concurrency: int, requests: int) -> float:
    """Generate batch after batch of `concurrency` equal prompts; give output tokens a second.

    A batch is over when its last answer is, so lengths that differ would only cost it.
    Raises: UnfitError: the lengths differ.
    """
    if shape == workloads.MIX:
        raise UnfitError("a static batch wants equal lengths")
    lengths = workloads.longest(shape)
    vocab_size, device = model.config.vocab_size, model.device
    batches = [
        [
            workloads.draw_prompt(lengths.prompt, vocab_size, first + number)
            for number in range(concurrency)
        ]
        for first in range(0, requests, concurrency)
    ]

    def generate(prompts: list[list[int]]) -> int:
        ids = torch.tensor(prompts, device=device)  # [B, T]
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=lengths.output,
            max_new_tokens=lengths.output,
            cache_implementation="static",
        )  # [B, T + N]
        return int(output.shape[0] * (output.shape[1] - ids.shape[1]))

    generate(batches[0])  # compiles
    _wait()
    began_s = time.perf_counter()
    tokens = sum(generate(batch) for batch in batches)
    _wait()
    return tokens / (time.perf_counter() - began_s)


def play_continuous(model: Any, shape: str, concurrency: int, requests: int) -> float:
    """Keep `concurrency` requests in transformers' continuous batching; give output tokens/s.

    Its thread writes to tensors that are made in this one, so not in inference mode.
    Raises: UnfitError: this transformers has none, or it stopped by itself.
    """
    if not hasattr(model, "continuous_batching_context_manager"):
        raise UnfitError(f"transformers {VERSION} has no continuous batching")
    lengths = workloads.draw_lengths(shape, requests)
    vocab_size = model.config.vocab_size
    waiting = [
        (workloads.draw_prompt(length.prompt, vocab_size, number), length.output)
        for number, length in enumerate(lengths)
    ]
    waiting.reverse()
    config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=NO_TOKEN, max_new_tokens=max(n.output for n in lengths)
    )
    with model.continuous_batching_context_manager(
        generation_config=config, block=True, timeout=30
    ) as manager:

        def send() -> None:
            prompt, output = waiting.pop()
            manager.add_request(prompt, max_new_tokens=output)

        manager.add_request(waiting[-1][0], max_new_tokens=4)
        _next_result(manager)
        began_s = time.perf_counter()
        tokens = done = 0
        for _ in range(min(concurrency, len(waiting))):
            send()
        while done < requests:
            tokens += len(_next_result(manager).generated_tokens)
            done += 1
            if waiting:
                send()
        return tokens / (time.perf_counter() - began_s)


def _next_result(manager: Any) -> Any:
    while True:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise UnfitError(str(result.error))
            return result
        if result is None and not manager.is_running():
            raise UnfitError("its thread ended by itself")


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


PEERS: dict[str, tuple[str, Callable[[Any, str, int, int], float]]] = {
    "static": (f"transformers {VERSION} static cache, compiled", play_static),
    "continuous": (f"transformers {VERSION} continuous batching", play_continuous),
}


def main(arguments: list[str] | None = None) -> int:
    """Play the cases of the command line with each peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--shapes", default="1024x1024", help="prompt x output, or mix")
    parser.add_argument("--concurrency", default="64")
    parser.add_argument("--requests", type=int, default=0, help="default: twice the concurrency")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"some of {', '.join(PEERS)}")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds after which no case begins"
    )
    began_s, asked = time.monotonic(), parser.parse_args(arguments)
    if unknown := set(asked.peers.split(",")) - PEERS.keys():
        parser.error(f"--peers has {', '.join(sorted(unknown))}, and knows {', '.join(PEERS)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(asked.model_path, dtype=dtype)
    model = model.eval().to(device)
    model.generation_config.eos_token_id = None
    found: dict[str, dict[str, float]] = {}
    for shape in asked.shapes.split(","):
        for concurrency in map(int, asked.concurrency.split(",")):
            case = f"{workloads.title(shape)} concurrency {concurrency}"
            for peer, play in (PEERS[name] for name in asked.peers.split(",")):
                if time.monotonic() - began_s > asked.budget:
                    print(f"{case}, {peer}: left out: no time", flush=True)
                    continue
                requests = asked.requests or 2 * concurrency
                try:
                    model.set_attn_implementation("sdpa")  # a way may have changed it
                    value = play(model, shape, concurrency, requests)
                except UnfitError as reason:
                    print(f"{case}, {peer}: left out: {reason}", flush=True)
                    continue
                except Exception as error:  # a peer's fault is no reason to end
                    print(f"{case}, {peer}: failed: {type(error).__name__}: {error}", flush=True)
                    continue
                print(f"{case}, {peer}: {value:.1f} output tokens/s", flush=True)
                found.setdefault(case, {})[peer] = value
                write_whole(asked.json, json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
