"""warmup_qk_norm without a GPU: what it would build is what calls launch."""

from __future__ import annotations

import pickle
from dataclasses import replace
from unittest import mock

import pytest
import torch
from head_norms import BF16, HeadCase
from planning import H200

import fusednorm
from fusednorm.tools import warm

CASES = {
    "rotated": HeadCase(cols=64, heads=8, rotary=64, dtype=BF16),
    "heads first, LayerNorm": HeadCase(norm="layer", cols=96, rotary=32, heads_first=True, table_dims="BS", dtype=BF16),
    "of all heads": HeadCase(cols=64, rotary=64, whole=True, dtype=BF16),
    "packed": HeadCase(cols=64, rotary=64, packed=True, dtype=BF16),
    "frozen": HeadCase(cols=64, dtype=BF16),
}


def call(name: str, tokens: int, on: str, packed, separate, **more):
    """A call of one of the two functions on tensors of so many tokens: what it returns, and which require grad."""
    case = replace(CASES[name], tokens=tokens)
    given, named = case.tensors(on), case.settings | {"rotary": case.tables(on)} | more
    if name == "frozen":
        given |= {of: each.detach() for of, each in given.items() if "weight" in of}
    if not case.packed:
        return separate(**given, heads_dim=-3 if case.heads_first else -2, **named), list(given.values())
    width = (case.heads + 2 * case.kv_heads) * case.cols
    qkv = torch.empty(case.batch, tokens, width, dtype=BF16, device=on, requires_grad=True)
    parameters = {of: each for of, each in given.items() if of not in "qk"}
    return packed(qkv, case.heads, case.kv_heads, **parameters, **named), [qkv, *parameters.values()]


def builds(name: str) -> tuple[set[str], set[str]]:
    """Those of a call of 70 tokens and of its gradient, and those that are made after warmup, of another number."""
    from fusednorm.host import gpus, launcher
    from fusednorm.host.kernel_devices import kernels_on
    from fusednorm.tools.compilation import build_key

    launched, made = [], []

    def run(program, *_):
        launched.extend(program.launches)
        return tuple([each and torch.zeros(each.shape, dtype=each.dtype) for each in program.outputs]), None

    def build_ahead(launches, *_):
        made.extend(pickle.loads(pickle.dumps([each for each, _ in launches])))
        return len(launches)

    with mock.patch.object(gpus, "spec_of", lambda _: H200), mock.patch.object(launcher, "run", run), kernels_on("cpu"):
        outputs, leaves = call(name, 70, "cpu", fusednorm.qk_norm_packed, fusednorm.qk_norm)
        learned = [each for each in leaves if each.requires_grad]
        torch.autograd.grad(outputs, learned, [torch.ones_like(each) for each in outputs])
        with mock.patch.object(warm, "build_ahead", build_ahead):
            ahead = fusednorm.warmup_qk_norm_packed, fusednorm.warmup_qk_norm
            count, _ = call(name, 4, "meta", *ahead, device="meta")
    assert count == len(launched) == len(made)
    return {build_key(each, 90) for each in launched}, {build_key(each.launch(H200), 90) for each in made}


@pytest.mark.parametrize("name", CASES)
def test_a_call_needs_no_build_that_its_warmup_has_not_made(name, workers):
    called, made = workers.submit(builds, name).result()
    kernels = {"frozen": 2, "of all heads": 5}  # two launches for 4 heads and for 2
    assert called == made and len(called) == kernels.get(name, 3)


def test_without_a_gradient_a_warmup_makes_the_forward_alone(workers):
    assert workers.submit(forward_alone).result() == ["forward"]


def forward_alone() -> list[str]:
    from fusednorm.host import gpus

    names: list = []
    with mock.patch.object(gpus, "spec_of", lambda _: H200):
        with mock.patch.object(warm, "build_ahead", lambda launches, *_: names.extend([each for _, each in launches])):
            q = torch.empty(1, 5, 4, 64, dtype=BF16, device="meta")
            fusednorm.warmup_qk_norm(q, q, device="meta")
    return [each.kernel.__name__ for each in names]


def test_there_is_nothing_to_do_on_a_cpu_nor_for_norms_of_all_heads_that_are_norms_of_ours():
    q, weight = torch.empty(1, 5, 4, 64), torch.empty(4 * 64)
    assert fusednorm.warmup_qk_norm(q, q) == fusednorm.warmup_qk_norm_packed(q.flatten(-2), 2, 1) == 0
    q, weight = q.to("meta"), weight.to("meta")
    assert fusednorm.warmup_qk_norm(q, q, weight, weight, device="meta") == 0


def test_wrong_arguments_are_refused_as_by_the_calls_and_as_by_warmup():
    q = torch.empty(1, 5, 4, 64)
    with pytest.raises(RuntimeError, match="^warmup_qk_norm: device must be a CUDA GPU or a CPU, got mps"):
        fusednorm.warmup_qk_norm(q, q, device="mps")
    with pytest.raises(RuntimeError, match="^warmup_qk_norm: inputs\\[1\\] must end in 64 columns"):
        fusednorm.warmup_qk_norm(q, q[..., 1:])
    with pytest.raises(RuntimeError, match="^warmup_qk_norm_packed: qkv must end in a multiple of 5 columns, got"):
        fusednorm.warmup_qk_norm_packed(q, 3, 1)
    with pytest.raises(RuntimeError, match=r"^warmup_qk_norm: weights\[1\] must have shape \(256,\), got \(255,\)"):
        fusednorm.warmup_qk_norm(q, q, torch.empty(256), torch.empty(255))
