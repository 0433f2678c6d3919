"""One question to torch or Triton, asked in a process of its own: a crash there is an answer too.

Run by `check_env.py` as a script; imports nothing of ours, because it must run where that fails.
Prints one line of JSON; an error ends it with a traceback.

    python env_probe.py gpu                    what torch sees
    python env_probe.py run cuda|cpu           compile a kernel, run it, check its result
    python env_probe.py cross-compile 90       compile it for a GPU that need not be here
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SIZE = 32


@triton.jit
def matmul_bias(a_ptr, b_ptr, bias_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply two square tiles and add a bias: loads, a reduction by `tl.dot`, a store."""
    # grid: one program
    row = tl.arange(0, SIZE)[:, None]  # [SIZE, 1]
    col = tl.arange(0, SIZE)[None, :]  # [1, SIZE]
    a = tl.load(a_ptr + row * SIZE + col)  # [SIZE, SIZE]
    b = tl.load(b_ptr + row * SIZE + col)  # [SIZE, SIZE]
    bias = tl.load(bias_ptr + col)  # [1, SIZE]
    tl.store(out_ptr + row * SIZE + col, tl.dot(a, b) + bias)


def look_at_gpus() -> dict[str, Any]:
    """List the GPUs that torch can use; units: bytes."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "name": properties.name,
                "architecture": f"sm_{properties.major}{properties.minor}",
                "free_bytes": free_bytes,
                "total_bytes": total_bytes,
                "shared_bytes": getattr(properties, "shared_memory_per_block_optin", 0),
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return {"gpus": gpus, "cuda": torch.version.cuda, "hip": torch.version.hip}


def run_kernel(device: str) -> dict[str, Any]:
    """Run the kernel on small whole numbers, whose products and sums are exact."""
    a = torch.randint(-4, 5, (SIZE, SIZE), device=device).to(torch.float16)
    b = torch.randint(-4, 5, (SIZE, SIZE), device=device).to(torch.float16)
    bias = torch.randint(-4, 5, (SIZE,), device=device).to(torch.float32)
    out = torch.empty((SIZE, SIZE), device=device, dtype=torch.float32)
    matmul_bias[(1,)](a, b, bias, out, SIZE=SIZE, enable_fp_fusion=True)
    expected = a.float() @ b.float() + bias
    return {"max_error": (out - expected).abs().max().item()}


def cross_compile(capability: int) -> dict[str, Any]:
    """Compile the kernel to a binary; needs no GPU and no driver. Units: bytes."""
    signature = {"a_ptr": "*fp16", "b_ptr": "*fp16", "bias_ptr": "*fp32", "out_ptr": "*fp32"}
    source = ASTSource(matmul_bias, signature | {"SIZE": "constexpr"}, constexprs={"SIZE": SIZE})
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"enable_fp_fusion": True})
    return {
        "binary_bytes": len(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
    }


def main(question: str, *arguments: str) -> None:
    """Answer the question on the command line."""
    if question == "gpu":
        answer = look_at_gpus()
    elif question == "run":
        answer = run_kernel(*arguments)
    elif question == "cross-compile":
        answer = cross_compile(int(*arguments))
    else:
        raise ValueError(f"unknown question {question!r}")
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
