"""The body of `verify`: prove every kernel, then every layer, and say where it departs.

Called by the command line only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from treadle.ir.builder import MAX_BIASES
from treadle.ir.errors import KernelError
from treadle.runtime.commands import artifact_of
from treadle.runtime.compile_command import compile_into_cache
from treadle.runtime.console import print_json, print_table
from treadle.runtime.diagnose import Finding, find_cause
from treadle.runtime.loading import LoadedArtifact, ServeOptions, load_artifact
from treadle.runtime.plan import RESAMPLE
from treadle.runtime.progress import Progress
from treadle.runtime.triton_program import TritonProgram
from treadle.runtime.verify import (
    HINTS,
    LayerCheck,
    OpCheck,
    fill_adjustments,
    prepare_prompts,
    verify_layers,
    verify_program,
)

# Lengths on and around page edges, and one that a chunk of the smallest bucket does not hold.
PROMPT_LENGTHS = (1, 15, 16, 17, 33)
NUM_PAGES = 96  # more than these prompts fill, of the smallest pages


def run_verify(
    source: str, target: str, kernels_only: bool, kv_dtype: str, progress: str, as_json: bool
) -> None:
    """Prove a model's kernels against their references and its layers against transformers.

    Raises: KernelError: a check failed; names the first one and what to look at.
    """
    path = artifact_of(source, target, progress, compile_into_cache, kv_dtype)
    options = ServeOptions(num_pages=NUM_PAGES, kv_dtype=kv_dtype)
    with Progress(progress) as shown, shown.phases() as report:
        loaded = load_artifact(path, options, report)
        launches = _verify_kernels(loaded, report)
        layers: list[LayerCheck] = []
        causes: list[Finding] = []
        if not kernels_only:
            report("comparing layers with transformers")
            prompt = _prompt(loaded, 24)
            layers = list(verify_layers(loaded, prompt))
            departed = next((check for check in layers if not check.passed), None)
            if departed is not None:
                report(f"looking for what {departed.layer} has wrong")
                causes = find_cause(loaded, prompt, departed)
    if as_json:
        print_json(
            {
                "artifact": str(path),
                "kernels": [{**asdict(check), "passed": check.passed} for check in launches],
                "layers": [
                    {
                        "layer": check.layer,
                        "error": check.error,
                        "tolerance": check.tolerance,
                        "passed": check.passed,
                        "left_out": check.left_out,
                    }
                    for check in layers
                ],
                "causes": [asdict(cause) for cause in causes],
            }
        )
    else:
        _print(launches, layers)
    _raise_first(launches, layers, causes)


def _prompt(loaded: LoadedArtifact, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    vocab_size = int(loaded.checkpoint.config["vocab_size"])
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


def _verify_kernels(loaded: LoadedArtifact, report: Callable[[str], None]) -> list[OpCheck]:
    """Play prompts and a decode step through every program that launches kernels."""
    found: list[OpCheck] = []
    engine = loaded.engine
    for (step, bucket), program in loaded.programs.items():
        if not isinstance(program, TritonProgram):
            continue
        report(f"checking the {step} step of up to {bucket}")
        graph = loaded.graphs[program.plan.form]
        room = bucket if step == "mixed" else engine.max_step_tokens
        prompts: list[list[int]] = []
        for length in PROMPT_LENGTHS:
            used = sum(map(len, prompts))
            if used + length <= room and len(prompts) < min(bucket, engine.max_rows):
                prompts.append(_prompt(loaded, length))
        sizes = prepare_prompts(loaded, prompts)
        if step == "decode":
            loaded.state.fill_caches()
            loaded.state.write_decode(len(prompts))
            sizes = bucket, bucket
        found += verify_program(program, graph, loaded.state, *sizes)
        again = loaded.resamples[step, bucket]
        assert isinstance(again, TritonProgram), "of the same target as the step"
        fill_adjustments(loaded.state, _prompt(loaded, MAX_BIASES))
        found += verify_program(again, loaded.graphs[RESAMPLE], loaded.state, *sizes)
    return found


def _print(launches: Sequence[OpCheck], layers: Sequence[LayerCheck]) -> None:
    by_kernel: dict[str, list[OpCheck]] = {}
    for check in launches:
        by_kernel.setdefault(check.kernel, []).append(check)
    rows = [("kernel", "results", "worst relative error", "allowed", "")]
    for kernel, checks in sorted(by_kernel.items()):
        worst = max(checks, key=lambda check: check.error)
        verdict = "ok" if all(check.passed for check in checks) else "FAILED"
        rows.append(
            (kernel, str(len(checks)), f"{worst.error:.2e}", f"{worst.tolerance:.0e}", verdict)
        )
    if launches:
        print_table(rows)
    else:
        print("The target `reference` has no kernels: their meaning is what runs.")
    if layers:
        print("\nAgainst transformers (eager, float32):")
        print_table([(check.layer, f"{check.error:.2e}", _verdict(check)) for check in layers])


def _verdict(check: LayerCheck) -> str:
    verdict = "ok" if check.passed else "DEPARTS"
    if not check.left_out:
        return verdict
    count = f"{check.left_out} of {len(check.compared)}"
    return f"{verdict}, without {count} tokens, near a tie of their experts"


def _raise_first(
    launches: Sequence[OpCheck], layers: Sequence[LayerCheck], causes: Sequence[Finding]
) -> None:
    failed = next((check for check in launches if not check.passed), None)
    if failed is not None:
        raise KernelError(
            f"Kernel {failed.kernel} departs from its reference at `{failed.op}`: result "
            f"`{failed.result}` is off by {failed.error:.3g}, allowed are {failed.tolerance:g}.",
            remedy="`treadle show ARTIFACT --kernel NAME` prints it; its docstring says what it "
            "should compute.",
        )
    departed = next((check for check in layers if not check.passed), None)
    if departed is not None:
        raise KernelError(
            f"The model departs from transformers at {departed.layer}: relative error "
            f"{departed.error:.3g}, allowed are {departed.tolerance:g}.",
            remedy=_advice(departed, causes),
        )


def _advice(departed: LayerCheck, causes: Sequence[Finding]) -> str:
    """Say what to look at: a change that makes the layer agree, or what is often wrong."""
    agreeing = [cause for cause in causes if cause.error <= departed.tolerance]
    if agreeing:
        best = "; or with ".join(cause.what for cause in agreeing[:3])
        return f"It agrees with {best}. Say so in the spec, or in the config."
    closer = "; ".join(f"{cause.what} ({cause.error:.3g})" for cause in causes[:3])
    text = "Kernels agree with their references, so the spec differs there. Look at "
    text += "; ".join(HINTS) + "."
    return f"{text} It comes closer, and no further, with {closer}." if closer else text
