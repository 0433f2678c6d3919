"""Parts of a result that one program leaves for another of the same launch, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Two names that changed between Triton 3.6 and 3.9.
sync_group = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def hand_over(arrivals_ptr):
    """Count this thread: what it has written can be read by who has waited for all of them."""
    gl.inline_asm_elementwise(
        "red.release.gpu.global.add.s32 [$1], 1; // $0",
        "=r,l",
        [arrivals_ptr.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def count_arrivals(arrivals_ptr):
    """Read how many threads have handed their part over."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];",
        "=r,l",
        [arrivals_ptr.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def take_over(arrivals_ptr):
    """Wait for all threads of another group of four warps, and set their count to 0 again."""
    arrived = count_arrivals(arrivals_ptr)
    while arrived < 128:
        arrived = count_arrivals(arrivals_ptr)
    sync_group()  # everybody has seen it
    gl.inline_asm_elementwise(
        "st.relaxed.gpu.global.s32 [$1], 0; // $0",
        "=r,l",
        [arrivals_ptr.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
