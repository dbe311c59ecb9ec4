"""bench.ahead without a GPU: when cases come, and what is compiled of them."""

from __future__ import annotations

import time
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
import torch
import triton
from compiling import stand_in_for_a_gpu
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from bench import ahead, forms, heads
from fusednorm.planner.device import H200

BF16 = torch.bfloat16


def note(folder: Path, name: str, seconds: float = 0) -> None:
    time.sleep(seconds)
    with (folder / name).open("a") as file:
        file.write(f"{inductor_config.compile_threads}\n")


def fail() -> None:
    raise ValueError


def test_a_case_comes_once_its_jobs_are_done_in_processes_that_start_none(tmp_path):
    jobs = {"a": [(note, tmp_path, "shared", 0.5), (fail,)], "b": [(note, tmp_path, "shared", 0.5)]}
    jobs["c"] = [(note, tmp_path, "never", 100)]
    for case in ahead.in_turn(list(jobs), jobs.get):
        assert (tmp_path / "shared").read_text() == "1\n"
        if case == "b":
            break
    assert not (tmp_path / "never").exists()


def touch_at_exit(path: Path) -> None:
    Finalize(None, path.touch, exitpriority=1)


def test_processes_end_by_themselves_once_all_cases_have_come(tmp_path):
    """Those that are killed leak the semaphores that libraries make."""
    assert list(ahead.in_turn(["a"], lambda _: [(touch_at_exit, tmp_path / "ended")])) == ["a"]
    assert (tmp_path / "ended").exists()


def test_a_candidate_is_compiled_as_it_is_timed(monkeypatch):
    seen, leaf = [], torch.ones(2, requires_grad=True)
    monkeypatch.setattr(torch.autograd, "grad", lambda *_: seen.append("gradients"))

    def run():
        kernel = object.__new__(CachingAutotuner)
        seen.append((torch.is_grad_enabled(), functorch_config.donated_buffer, kernel.run(leaf, stream=None)))
        return (leaf * 2,)

    for gradients in (False, True):
        ahead.compile_call(run, [leaf], gradients)
    assert seen == [(False, False, None), (True, False, None), "gradients"]


@triton.autotune(configs=[triton.Config({"block": size}) for size in (16, 32, 64)], key=[])
@triton.jit
def doubled(ptr, block: triton.language.constexpr):
    at = ptr + triton.language.arange(0, block)
    triton.language.store(at, 2 * triton.language.load(at))


def compiled_choices(part: int) -> list[int]:
    """The blocks of the choices that are compiled; in a process that does not interpret."""
    doubled.fn.device_caches.clear()
    with stand_in_for_a_gpu(H200):
        ahead.compile_call(lambda: doubled[(1,)](torch.empty(64)) or (), [], False, part)
    (kernels, *_), *_ = doubled.fn.device_caches.values()
    return [kernel.src.constants[(1,)] for kernel in kernels.values()]


@pytest.mark.parametrize("part, blocks", [(0, [16]), (2, [64])])
def test_a_job_compiles_its_part_of_the_choices_and_times_none(part, blocks, workers):
    assert workers.submit(compiled_choices, part).result() == blocks


def test_every_kernel_that_a_cache_keeps_has_a_job():
    given = [*"--shapes 8x64 --norms rms --forms of_gated --packed".split(), "--group-size", "16"]
    (case,) = forms.make_cases(forms.parse(given))
    jobs = list(forms.compile_jobs(case, forms.NAMES))
    assert {(name, gradients) for _, _, name, gradients, _ in jobs} == {
        (name, gradients) for name in ("ours", "inductor") for gradients in (False, True)
    }
    options = heads.parse("--tokens 8 16 --rotary none".split())
    of = [set(heads.compile_jobs(case, H200, options)) for case in heads.make_cases(options)]
    assert [len(jobs) for jobs in of] == [3, 3] and len(of[0] | of[1]) == 5  # no build of ours depends on the tokens
    (case,) = heads.make_cases(heads.parse("--tokens 8 --rotary halves --frozen yes".split()))
    assert (heads.compile_candidate, case, "unsloth", True) in set(heads.compile_jobs(case, H200, options))
