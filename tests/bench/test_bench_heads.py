"""bench.heads without a GPU: what it times computes the same, and its plans are other plans."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from bench import forms, heads
from bench.peers import unsloth
from fusednorm.heads import plan
from fusednorm.planner.device import H200
from fusednorm.tools.oracle import stock

BF16 = torch.bfloat16


KINDS = [(norm, packed, "norm", False, False) for norm in ("rms", "layer") for packed in (False, True)]
KINDS += [("rms", True, "rotary", False, True), ("layer", False, "norm", True, True)]
KINDS += [("rms", False, "rotary", True, False)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rotary", heads.ROTARY)
def test_ours_is_what_models_write(rotary, kind, monkeypatch):
    def stocks(case, like):
        has_bias = None if like.bias is None else BF16
        case = replace(case, x_dtype=BF16, weight_dtype=BF16, bias_dtype=has_bias)
        return lambda given: stock(case, given), lambda given, _: stock(case, given)

    monkeypatch.setattr(heads.cudnn, "graphs", stocks)
    torch.manual_seed(0)
    norm, packed, *more = kind
    case = heads.HeadCase(6, 4, 2, 16, rotary, packed, norm, BF16, *more)
    given = case.inputs("cpu")
    tables = case.tables(torch.empty(0, dtype=BF16))
    wide = {name: each.detach().double().requires_grad_(each.requires_grad) for name, each in given.items()}
    grads = tuple(torch.randn(each.shape) for each in heads.written(case, given, tables))
    exact = forms.all_of(lambda each: heads.written(case, each, tables and [t.double() for t in tables]), wide, grads)
    runs = [heads.ours, heads.written, *([heads.norms, heads.by_cudnn()] if rotary == "none" else [])]
    found = [forms.all_of(lambda each, run=run: run(case, each, tables), given, grads) for run in runs]
    of_ours, least, *others = [forms.errors_of(each, exact) for each in found]
    for errors in (of_ours, *others):
        assert all(error <= forms.FACTOR * max(most, 2**-9) for error, most in zip(errors, least, strict=True))


@pytest.mark.parametrize("rotary", heads.ROTARY)
@pytest.mark.parametrize("packed", [False, True])
def test_a_sweep_has_other_plans(packed, rotary):
    case = heads.HeadCase(4096, 32, 8, 128, rotary, packed, "rms", BF16)
    calls = {call.problem.direction: call for call in heads.calls_of_kernels(case)}
    ours = {direction: plan.choose(call.problem, H200) for direction, call in calls.items()}
    others = heads.swept(case, H200)
    assert len(others) >= 8
    for direction, shape in others.values():
        with heads.planned(direction, shape):
            found = {way: plan.choose(call.problem, H200) for way, call in calls.items()}
        assert [way for way in found if found[way] != ours[way]] == [direction]
    assert calls["backward"].problem.copies == packed


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_compiled_ahead_wants_the_gradients_that_are_timed(packed):
    cases = [heads.HeadCase(4096, 32, 8, 128, "halves", packed, "rms", BF16, frozen=frozen) for frozen in (False, True)]
    backwards = [heads.calls_of_kernels(case)[-1].problem for case in cases]
    assert [(each.wants_dx, each.wants_dw) for each in backwards] == [(True, True), (True, False)]


def test_only_files_of_kernels_are_loaded_of_unsloth(monkeypatch, tmp_path):
    """No module of its packages stays, and no mark of theirs on keys of Inductor's cache."""
    sources = {
        "__init__.py": "raise AssertionError",
        "device_type.py": "from unsloth_zoo.utils import Version",
        "kernels/__init__.py": "raise AssertionError",
        "kernels/utils.py": "from ..device_type import Version",
        "kernels/fp8.py": "from unsloth_zoo.log import logger\n"
        "from unsloth_zoo.temporary_patches.common import torch_compile",
        "kernels/qk_norm_rope.py": "import torch\nfrom .utils import Version\nfrom . import fp8\n"
        "torch.compiler.config.cache_key_tag += 'unsloth'\n"
        "def fast_qk_norm_rope(q_norm, k_norm, q, k, cos, sin):\n"
        "    return [(x * norm.weight * cos).transpose(1, 2) for norm, x in ((q_norm, q), (k_norm, k))]",
    }
    for name, source in sources.items():
        path = tmp_path / "unsloth" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(unsloth, "_kernels", unsloth._kernels.__wrapped__)
    tag = torch.compiler.config.cache_key_tag
    q, k, weight, table = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 2, 8), torch.randn(8), torch.tensor(2.0)
    found = unsloth.qk_norm_rope(q, k, weight, weight, (table, table), 1e-6)
    assert all(torch.equal(got, 2 * x * weight) for got, x in zip(found, (q, k), strict=True))
    assert not [name for name in sys.modules if name.startswith("unsloth")]
    assert torch.compiler.config.cache_key_tag == tag


def test_a_kernel_of_unsloth_without_its_package_says_so(monkeypatch):
    monkeypatch.setattr(unsloth.packages.util, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match="^unsloth is not installed: pip install --no-deps unsloth brings it"):
        unsloth._kernels.__wrapped__()
