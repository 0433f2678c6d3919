"""The bodies of the commands that show what a model is, and what became of it.

Results go to stdout. Called by the command line only; the parameters are the options' names.
"""

from __future__ import annotations

from pathlib import Path

from treadle.ir.errors import ArtifactError, ConfigError, SpecError
from treadle.ir.graph import Graph, Op
from treadle.ir.text import print_graph, print_op, print_weight
from treadle.models.registry import read_config
from treadle.runtime import artifact as artifacts
from treadle.runtime import compiler, machine
from treadle.runtime.checkpoint import open_checkpoint
from treadle.runtime.compile_key import CompileOptions, engine_config
from treadle.runtime.compiler import Compilation
from treadle.runtime.console import print_table, program_name
from treadle.runtime.plan import PLAN


def run_show(
    source: str, step: str, fused: bool, few_tokens: bool, weights: bool, plan: bool, kernel: str
) -> None:
    """Print one view of a model or an artifact."""
    if plan or kernel:
        artifact = _open_artifact_for(source, "--plan" if plan else "--kernel")
        if kernel:
            print(_kernel_text(artifact, kernel), end="")
        else:
            programs = artifact.json(PLAN)["programs"]
            rows = [
                (p["step"], str(p["bucket"]), p["form"], str(len(p["launches"]))) for p in programs
            ]
            print_table([("step", "up to", "form", "launches"), *rows])
        return
    compilation = _build(source)
    graph = compilation.authored[step]
    if fused or few_tokens:
        graph = compilation.fused[_form(step, few_tokens)]
    if weights:
        print("\n".join(print_weight(weight) for weight in graph.weights))
    else:
        print(print_graph(graph), end="")


def run_explain(source: str, step: str, few_tokens: bool, op: str) -> None:
    """Print what became of the authored ops: the fused op of each, and each refusal on the way."""
    compilation = _build(source)
    form = _form(step, few_tokens)
    authored, fused = compilation.authored[step], compilation.fused[form]
    refusals = [
        refusal
        for record in compilation.passes[form]
        for refusal in record.refusals
        if not op or op in (refusal.op, *_origins_of(fused, refusal.op))
    ]
    if op:
        print(_explain_op(authored, fused, op))
    else:
        kinds: dict[str, int] = {}
        for each in fused.ops:
            name = each.params.kernel if each.body else each.kind
            kinds[name] = kinds.get(name, 0) + 1
        print(f"{len(authored.ops)} authored ops became {len(fused.ops)}:")
        print_table([(f"{count} ×", name) for name, count in kinds.items()])
    print("\nNot fused, and why:" if refusals else "\nNo fusion was refused.")
    for refusal in refusals:
        print(f"  {refusal}")


def _open_artifact_for(source: str, option: str) -> artifacts.Artifact:
    if not artifacts.is_artifact(Path(source)):
        raise ArtifactError(
            f"{option} shows what was compiled, and `{source}` is not an artifact.",
            remedy=f"Make one: {program_name()} compile {source} -o ARTIFACT",
        )
    return artifacts.open_artifact(Path(source))


def _kernel_text(artifact: artifacts.Artifact, name: str) -> str:
    prefix = "kernels/"
    names = [file.removeprefix(prefix) for file in artifact.manifest.files if prefix in file]
    wanted = name if name.endswith(".py") else f"{name}.py"
    if wanted not in names:
        known = ", ".join(sorted(text.removesuffix(".py") for text in names))
        raise ArtifactError(
            f"{artifact.path} has no kernel `{name}`.",
            remedy=f"It has {known}." if known else "It has none: its target needs none.",
        )
    return artifact.text(prefix + wanted)


def _build(source: str) -> Compilation:
    """Build the graphs of a model source, or those of the model that an artifact was made from."""
    path = Path(source)
    if artifacts.is_artifact(path):
        manifest = artifacts.read_manifest(path)
        config = read_config(open_checkpoint(manifest.model_path).config)
        return compiler.build(config, manifest.engine)
    config = read_config(open_checkpoint(source).config)
    return compiler.build(config, engine_config(config, CompileOptions(), machine.look()))


def _form(step: str, few_tokens: bool) -> str:
    form = f"{step}.few" if few_tokens else step
    if form not in compiler.FORMS:
        raise ConfigError(
            f"The step `{step}` has no form for few tokens.", remedy="Use --step decode."
        )
    return form


def _explain_op(authored: Graph, fused: Graph, name: str) -> str:
    found = [op for op in authored.ops if name in (op.name, *op.outputs)]
    if not found:
        raise SpecError(
            f"No op makes a value `{name}` in this step.",
            remedy=f"`{program_name()} show MODEL` lists them.",
        )
    lines = [f"authored at {found[0].where}:", *print_op(found[0], authored, "  ")]
    for op in fused.ops:
        if name in (op.name, *op.outputs, *op.origin, *_origins(op)):
            lines += ["", "became:", *print_op(op, fused, "  ")]
    return "\n".join(lines)


def _origins(op: Op) -> tuple[str, ...]:
    return tuple(name for inner in op.body for name in (inner.name, *inner.outputs, *inner.origin))


def _origins_of(graph: Graph, name: str) -> tuple[str, ...]:
    return next((_origins(op) for op in graph.ops if op.name == name), ())
