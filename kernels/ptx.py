"""PTX instructions that Triton does not offer."""

import triton
import triton.language as tl


@triton.jit
def launch_dependents():
    """From sm_90 on: a dependent launch may be placed on the GPU once every CTA of this launch has come here or ended.
    It saves time and orders no memory: the dependent launch calls `wait_for_prerequisites` before it reads."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_for_prerequisites():
    """From sm_90 on: return once all CTAs of the previous launch have ended and all that they wrote is visible.

    Every CTA of a dependent launch must call this. One that reads before could see partials that are not written yet,
    and one that skips it would let the launch behind it begin too early."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
    )
