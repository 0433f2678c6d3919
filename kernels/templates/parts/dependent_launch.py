"""Dependent launch, in Gluon, which has no words of its own for it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_for_producer():
    """Wait until the kernels before this one have ended and their results can be read."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def let_dependents_begin():
    """Let the next kernel's programs take their places as this one's leave."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
