"""PTX that Triton has no name for."""

import triton
import triton.language as tl


@triton.jit
def launch_dependents():
    """From sm_90 on: a launch that is marked as dependent may be placed once every CTA has come here or has ended."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_for_prerequisites():
    """From sm_90 on: return once all CTAs of the launch before have ended, and what they wrote is for all to read. A
    CTA of a dependent launch that skipped this would let the launch behind it begin too early, so none may."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
    )
