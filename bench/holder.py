"""A kernel that occupies SMs of the current GPU, as a collective or a receive does, until it is told to end.

with Holder(8) as holder:    # 8 SMs are held from here on
    ...
    holder.release()         # the holder ends once all work enqueued on the current stream so far is done
"""

from __future__ import annotations

import time

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PATIENCE_S = 2.0  # the kernel ends after this time even if nobody tells it to, so that a failing test does not hang
NUM_WARPS = 32  # with 64 registers a thread these take all registers of an SM


@gluon.jit(do_not_specialize=["patience_ns"])
def hold(told_ptr, held_ptr, ended_ptr, memory_ptr, patience_ns, num_warps: gl.constexpr):
    """Each CTA takes all registers and nearly all shared memory of its SM and counts itself in `held`. It ends when it
    is told to, or when its patience is over; `ended` counts the CTAs that were told."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    many = gl.load(memory_ptr + gl.arange(0, 32768, flat))
    some = gl.load(memory_ptr + gl.arange(0, 16384, flat))
    large = gl.allocate_shared_memory(gl.float32, [32768], plain)
    middle = gl.allocate_shared_memory(gl.float32, [16384], plain)
    small = gl.allocate_shared_memory(gl.float32, [4096], plain)
    large.store(many)
    middle.store(some)
    small.store(gl.load(memory_ptr + gl.arange(0, 4096, flat)))
    gl.atomic_add(held_ptr, 1)
    told = gl.inline_asm_elementwise(
        """{
    .reg .pred enough;
    .reg .b32 told;
    .reg .b64 now, end;
    mov.u64 now, %globaltimer;
    add.u64 end, now, $2;
HOLD:
    ld.acquire.gpu.global.u32 told, [$1];
    setp.ne.u32 enough, told, 0;
    @enough bra DONE;
    mov.u64 now, %globaltimer;
    setp.gt.u64 enough, now, end;
    @enough bra DONE;
    nanosleep.u32 500;
    bra HOLD;
DONE:
    mov.u32 $0, told;
}""",
        "=r,l,l", [told_ptr.to(gl.uint64), patience_ns.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    gl.atomic_add(ended_ptr, told)
    # Without these stores the compiler would allocate neither the registers nor the shared memory.
    gl.store(memory_ptr + 65536 + gl.arange(0, 32768, flat), many + large.load(flat))
    gl.store(memory_ptr + 65536 + gl.arange(0, 16384, flat), some + middle.load(flat))
    gl.store(memory_ptr + 65536 + gl.arange(0, 4096, flat), small.load(flat))


class Holder:
    """Holds `sms` SMs of the current GPU on its own stream, from `start` until `release` or until its patience is over.

    `was_told` synchronizes and says whether the kernel ended because of `release`.
    """

    def __init__(self, sms: int, patience_s: float = PATIENCE_S):
        self._sms, self._patience_ns = sms, int(patience_s * 1e9)
        self._words = torch.zeros(3, dtype=torch.int32, device="cuda")  # told, held, ended
        self._memory = torch.zeros(131072, device="cuda")
        self._stream, self._reader = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)
        torch.cuda.synchronize()

    def __enter__(self) -> Holder:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        with torch.cuda.stream(self._reader):
            self._words[0].fill_(1)
        torch.cuda.synchronize()

    def start(self) -> None:
        """Returns once the SMs are held."""
        if not self._sms:
            return
        self._words.zero_()
        self._stream.wait_stream(torch.cuda.current_stream())
        told, held, ended = self._words.unbind()
        with torch.cuda.stream(self._stream):
            hold[(self._sms,)](told, held, ended, self._memory, self._patience_ns, num_warps=NUM_WARPS)
        deadline = time.monotonic() + 10
        while self._read(1) < self._sms:
            if time.monotonic() > deadline:
                raise RuntimeError(f"holder: {self._sms} SMs must be held within 10 s, got {self._read(1)}")

    def release(self) -> None:
        """Ends the kernel once all work enqueued on the current stream is done."""
        self._words[0].fill_(1)

    def was_told(self) -> bool:
        torch.cuda.synchronize()
        return self._read(2) == self._sms

    def _read(self, word: int) -> int:
        with torch.cuda.stream(self._reader):
            return self._words[word].item()
