"""What a kernel's module says of the op it computes: a summary, the ops it covers, its cost."""

from __future__ import annotations

from treadle.ir.cost import op_cost
from treadle.ir.graph import Graph, Op
from treadle.ir.ops.params import describe
from treadle.ir.ops.registry import lookup
from treadle.kernels.emit import Header


def local_name(name: str) -> str:
    """Drop scopes and layer numbers of a name: kernels are shared by all layers."""
    sigil = "@" if name.startswith("@") else ""
    return sigil + [part for part in name.removeprefix("@").split(".") if not part.isdigit()][-1]


def header_of(op: Op, graph: Graph) -> Header:
    covers = []
    for inner in op.plain:
        results = ", ".join(f"{local_name(n)}: {graph.types[n]}" for n in inner.outputs)
        params = describe(inner.params)
        operands = ", ".join(map(local_name, inner.inputs)) + (f"; {params}" if params else "")
        call = f"{inner.kind}({operands})"
        covers.append(f"{results} = {call}" if results else call)
    return Header(_summary(op), tuple(covers), _cost_facts(op, graph))


def _summary(op: Op) -> str:
    first = [
        lookup(inner.kind).doc.partition("\n")[0].removesuffix(".")
        for inner in op.plain
        if lookup(inner.kind).role != "view"
    ]
    joined = "; then ".join(dict.fromkeys(first))
    return joined[0].lower() + joined[1:] + "."


def _cost_facts(op: Op, graph: Graph) -> tuple[str, ...]:
    def cost(tokens: int) -> tuple[int, int]:
        dims = {"T": tokens, "B": tokens, "C": 0, "R": 0, "M": 0, "P": 0}
        found = op_cost(op, graph, dims)
        return found.flops, found.bytes

    fixed, each, both = cost(0), cost(1), cost(2)
    facts: tuple[str, ...] = (
        f"Must move {fixed[1]:,} bytes and {each[1] - fixed[1]:,} per token; must compute "
        f"{each[0] - fixed[0]:,} operations per token.",
    )
    if both[1] - each[1] < each[1] - fixed[1]:
        facts += ("Tokens that choose the same experts move their weights once.",)
    if any(inner.kind in ("attention", "latent_attention") for inner in op.plain):
        return (
            *facts,
            "Keys and values come on top: their bytes and operations per context token.",
        )
    return facts
