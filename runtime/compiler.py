"""Model source → artifact: build, fuse, lower, emit, compile, and write it all down.

Called by the command line and the pipeline. Never loads weights: only their names and shapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from treadle.ir import pipeline
from treadle.ir.builder import build_resample
from treadle.ir.errors import ArtifactError
from treadle.ir.graph import Graph
from treadle.ir.text import print_graph
from treadle.models.config import ModelConfig
from treadle.models.registry import build_graph, find_family, read_config
from treadle.runtime import artifact as artifacts
from treadle.runtime import machine, planner
from treadle.runtime.artifact import TOKENIZER, Artifact
from treadle.runtime.binaries import BINARIES, compile_binaries, jobs_of
from treadle.runtime.checkpoint import Checkpoint, open_checkpoint
from treadle.runtime.compile_key import CompileOptions, wanted_manifest
from treadle.runtime.config import EngineConfig
from treadle.runtime.plan import RESAMPLE, Plan
from treadle.runtime.tables import table_for
from treadle.runtime.tokenizer import Tokenizer
from treadle.runtime.weights import check_names

Report = Callable[[str], None]


@dataclass(frozen=True)
class Form:
    """Say how a step's graph is fused.

    `few_tokens` folds norms into linears; `joined` appends k and v and attends in one kernel.
    """

    step: str
    few_tokens: bool = False
    joined: bool = False


# The fused graphs that programs may play; the planner names one for each bucket.
FORMS = {
    "decode.few": Form("decode", few_tokens=True),
    "decode": Form("decode"),
    "decode.few.joined": Form("decode", few_tokens=True, joined=True),
    "decode.joined": Form("decode", joined=True),
    "mixed": Form("mixed"),
}
# Any of these makes a folder one with a tokenizer.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class CompileResult:
    """Tell what `compile_model` did; `was_current` says that nothing had to be done."""

    artifact: Artifact
    was_current: bool


@dataclass(frozen=True)
class Compilation:
    """A model's graphs in all stages, ready to be lowered or shown."""

    config: ModelConfig
    engine: EngineConfig
    authored: Mapping[str, Graph]
    fused: Mapping[str, Graph]
    passes: Mapping[str, tuple[pipeline.PassRecord, ...]]


def build(config: ModelConfig, engine: EngineConfig) -> Compilation:
    """Build and fuse the graphs of both kinds of step. Raises: SpecError."""
    authored = {
        step: build_graph(
            config,
            step=step,
            dtype=engine.dtype,
            page_size=engine.page_size,
            kv_format=engine.kv_format,
        )
        for step in ("decode", "mixed")
    }
    family = find_family(config.architecture).name
    fused, passes = {}, {}
    for name, form in FORMS.items():
        graph, passes[name] = pipeline.run_passes(
            authored[form.step], few_tokens=form.few_tokens, joined=form.joined
        )
        fused[name] = replace(graph, name=f"{family}.{name}")
    # Last: the others come before it wherever any graph will do.
    fused[RESAMPLE] = build_resample(f"{family}.{RESAMPLE}", config.vocab_size)
    return Compilation(config, engine, authored, fused, passes)


def compile_model(
    source: str | Path, out: Path, options: CompileOptions, report: Report = lambda phase: None
) -> CompileResult:
    """Compile a model source (a Hugging Face directory or a GGUF file) into the artifact `out`.

    `report` is told each phase. Nothing is left behind on an error.
    Raises: CheckpointError, SpecError, ConfigError, KernelError, ArtifactError, MachineError.
    """
    report(f"reading {source}")
    checkpoint = open_checkpoint(source)
    config = read_config(checkpoint.config)
    if config.unknown_keys:
        report(f"config keys that nothing reads: {', '.join(config.unknown_keys)}")
    manifest = wanted_manifest(checkpoint, config, options, machine.look())
    engine = manifest.engine
    if artifacts.is_artifact(out):
        current = _open_if_current(out, manifest.key, report)
        if current is not None:
            if options.dump:
                write_dump(build(config, engine), options.dump)
            return CompileResult(current, was_current=True)
    report("building the graph")
    compilation = build(config, engine)
    check_names(compilation.authored["decode"].weights, checkpoint)
    if options.dump:
        write_dump(compilation, options.dump)
    with artifacts.writing(out) as folder:
        table = table_for(manifest.gpu, manifest.architecture, options.autotune, options.pin)
        stale: list[str] = []
        choose = partial(table.choose, on_stale=stale.append)
        plans = []
        for kv_format in manifest.kv_formats:
            variant = replace(engine, kv_format=kv_format)
            part = folder
            if kv_format != engine.kv_format:
                report(f"building the graph for a KV cache of {variant.kv_dtype}")
                compilation = build(config, variant)
                part = folder / artifacts.variant_folder(variant)
            plan = _write_programs(
                compilation, part, folder / "kernels", report, manifest.architecture, choose
            )
            plans.append((plan, compilation))
        stale = list(dict.fromkeys(stale))  # every layer has told
        for note in stale:
            report(note)
        report("converting the tokenizer")
        _copy_tokenizer(checkpoint, folder, report)
        if engine.target == "cuda":
            kernels = _compile_kernels(plans, manifest.architecture, folder, report)
            facts = {"kernels": kernels, "stale_schedules": stale}
            (folder / "report.json").write_text(json.dumps(facts, indent=1) + "\n")
        artifacts.finish_manifest(folder, manifest)
    return CompileResult(artifacts.open_artifact(out), was_current=False)


def _write_programs(
    compilation: Compilation,
    folder: Path,
    kernels: Path,
    report: Report,
    architecture: str,
    choose: planner.Choose,
) -> Plan:
    """Plan an engine's programs and write its graphs, its plan and the kernels."""
    (folder / "graph").mkdir(parents=True)
    for step, graph in compilation.authored.items():
        (folder / "graph" / f"{step}.authored.ir").write_text(print_graph(graph))
    for form, graph in compilation.fused.items():
        (folder / "graph" / f"{form}.ir").write_text(print_graph(graph))
    plan = planner.plan_programs(
        compilation.fused, compilation.engine, report, architecture=architecture, choose=choose
    )
    plan.write(folder, kernels)
    return plan


def _copy_tokenizer(checkpoint: Checkpoint, folder: Path, report: Report) -> None:
    """Give the artifact the tokenizer in the form that loads fastest.

    A folder without one still compiles, for `verify` and benchmarks; serving says what lacks.
    Raises: CheckpointError: there is one, and it can't be used.
    """
    if checkpoint.kind == "safetensors" and not any(
        (checkpoint.path / name).exists() for name in VOCABULARY_FILES
    ):
        report(f"no tokenizer: none of {', '.join(VOCABULARY_FILES)} in {checkpoint.path}")
        return
    Tokenizer.from_source(checkpoint).save(folder / TOKENIZER)


def _compile_kernels(
    plans: Sequence[tuple[Plan, Compilation]],
    architecture: str,
    folder: Path,
    report: Report,
) -> list[dict[str, Any]]:
    """Compile every kernel of the plans into the artifact, and tell what each uses."""
    kernels = folder / "kernels"
    found = {
        job.path: job
        for plan, built in plans
        for job in jobs_of(plan, built.fused, built.engine, kernels, architecture)
    }
    jobs = list(found.values())
    with closing(compile_binaries(jobs, folder / BINARIES, report)) as outcomes:
        resources = [
            {"module": Path(outcome.job.path).stem, **asdict(kernel)}
            for outcome in outcomes
            for kernel in outcome.kernels
        ]
    return sorted(resources, key=lambda row: str(row["module"]))


def _open_if_current(out: Path, key: str, report: Report) -> Artifact | None:
    """Give the artifact at `out` if it is what would be compiled; report a damaged one."""
    try:
        current = artifacts.open_artifact(out)
    except ArtifactError as error:
        report(f"replacing {out}: {error.message}")
        return None
    return current if current.manifest.key == key else None


def write_dump(compilation: Compilation, folder: Path) -> None:
    """Write the graph after each pass, numbered, and the refusals, for people to read and diff.

    Raises: MachineError: the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for step, graph in compilation.authored.items():
            (folder / f"{step}.00_authored.ir").write_text(print_graph(graph))
        for form, records in compilation.passes.items():
            for number, record in enumerate(records, start=1):
                (folder / f"{form}.{number:02}_{record.name}.ir").write_text(record.dump)
    except OSError as error:
        raise artifacts.write_error(folder, error) from error
