"""A norm behind a layer and the next one on a GPU: one launch forward, as two calls but for one rounding."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, EPS, FP16, FP32, FP64, NORMS, guarded_buffers, packed_slice, row_strided
from torch import Tensor

import fusednorm
from fusednorm.operands import OWN_OUTPUTS, in_two, operands_of
from fusednorm.ops import run

pytestmark = pytest.mark.gpu
NAMES = "x", "residual", "weight", "next_weight", "bias", "next_bias"  # as the functions take them
SHAPES = [(0, 128), (1, 4096), (3000, 77), (640, 1000), (20000, 128), (512, 5376), (2048, 4096), (4, 16384), (8, 65536)]
DTYPES = [(BF16, BF16, BF16), (FP16, FP16, FP32), (BF16, FP32, BF16), (FP32, FP32, None), (FP32, BF16, FP16)]
CASES = [  # all dtypes at the usual widths, and some at others
    (shape, dtypes, NORMS[(at + which) % 2])
    for at, shape in enumerate(SHAPES)
    for which, dtypes in enumerate((*DTYPES, (FP64, FP64, FP64)))
    if shape[1] in (1000, 4096) or (at + which) % 3 == 0
]


def tensors(shape, dtypes=(BF16, BF16, BF16), seed=0) -> dict[str, Tensor]:
    """Rows of x and the residual, and parameters, if they have a dtype."""
    generator = torch.Generator("cuda").manual_seed(seed)
    of_names = dict(zip(NAMES, (*dtypes, *dtypes[-1:] * 3), strict=True))
    sizes = {name: shape if name in ("x", "residual") else shape[-1:] for name, dtype in of_names.items() if dtype}
    drawn = {name: torch.randn(size, generator=generator, device="cuda") for name, size in sizes.items()}
    return {name: each.to(of_names[name]) for name, each in drawn.items()}


def asked(norm, given, **settings):
    fixed = {"normalized_shape": given["x"].shape[-1:], "eps": EPS}
    return operands_of(f"{norm}_norm_fwd_plus_residual_norm", (), given | fixed | settings)


def functions(norm):
    return getattr(fusednorm, f"{norm}_norm_add_{norm}_norm"), getattr(fusednorm, f"{norm}_norm_add")


def assert_one_rounding_apart(ours, theirs, but_for=0.0):
    """Sums in another order may be as far apart as they are in the accumulation dtype. A share of `but_for` of the
    elements may be further apart."""
    for got, want in zip(ours, theirs, strict=True):
        assert got is want is None or got.dtype is want.dtype
        if got is not None:
            accumulated = 2.0**-44 if got.dtype is FP64 else 2.0**-16
            near = torch.isclose(got, want, rtol=max(torch.finfo(got.dtype).eps, accumulated), atol=accumulated)
            assert int((~near).sum()) <= but_for * near.numel()


@pytest.mark.parametrize("shape, dtypes, norm", CASES, ids=str)
def test_outputs_are_those_of_two_calls(shape, dtypes, norm):
    given = tensors(shape, dtypes)
    # Where x_hat is rounded to another number, y is more than a rounding apart.
    for settings, but_for in (({"weight_offset": 1.0}, 0.0), ({"rounds_x_hat": True}, 1e-3)):
        operands = asked(norm, given, **settings)
        with guarded_buffers():
            ours = run(operands)
        assert_one_rounding_apart(ours[:OWN_OUTPUTS], in_two(operands, run)[:OWN_OUTPUTS], but_for)
        # The next norm is of our h: where h is a rounding apart, so are its norms.
        again = {name: given.get(f"next_{name}") for name in ("weight", "bias")} | {"x": ours[0], "eps": EPS}
        right = run(operands_of(f"{norm}_norm_fwd_affine", (), again | settings | {"normalized_shape": shape[-1:]}))
        assert_one_rounding_apart(ours[OWN_OUTPUTS:], [each for each in right if each is not None], but_for)


@pytest.mark.parametrize("norm", NORMS)
def test_one_kernel_runs_forward(norm):
    for cols in (1000, 4096, 65536):  # of which registers do not hold the last
        given = tensors((64, cols))
        run(asked(norm, given))  # compiles
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(asked(norm, given))
            torch.cuda.synchronize()
        kernels = [event.name for event in profile.events() if "CUDA" in str(event.device_type)]
        assert (len(kernels) == 1) == (cols < 65536), kernels


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", [row_strided, packed_slice])
def test_rows_of_any_layout_give_the_bits_of_contiguous_rows(layout, norm):
    given = tensors((32, 6, 4, 128))
    laid = given | {name: layout(given[name]) for name in ("x", "residual")}
    with fusednorm.force("multi_wave"):
        want, got = (run(asked(norm, each)) for each in (given, laid))
    assert_one_rounding_apart(got, want)


@pytest.mark.parametrize("wanted", [(True,) * 6, (True, False) * 3, (False, False, True, True, True, True)], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_are_those_of_two_calls(norm, wanted):
    both, add = functions(norm)
    affine = getattr(fusednorm, f"affine_{norm}_norm")
    for rows in (1, 700):
        given = tensors((rows, 2048))
        leaves = [given[name] for name in NAMES]
        leaves = [each.clone().requires_grad_(want) for each, want in zip(leaves, wanted, strict=True)]
        x, residual, weight, next_weight, bias, next_bias = leaves
        y, h = both(*leaves, EPS, weight_offset=1.0)
        first = add(x, residual, weight, bias, EPS, weight_offset=1.0)
        second = affine(first, next_weight, next_bias, EPS, weight_offset=1.0)
        of, up = [each for each in leaves if each.requires_grad], (torch.ones_like(y), torch.ones_like(h))
        ours, theirs = (torch.autograd.grad(each, of, up) for each in ((y, h), (second, first)))
        for got, want in zip(ours, theirs, strict=True):  # two calls round dh twice
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().amax()))


@pytest.mark.parametrize("norm", NORMS)
def test_captured_calls_and_calls_beside_free_sms_give_the_same(norm):
    both, _ = functions(norm)
    given = tensors((2048, 4096))
    arguments = [given[name] for name in NAMES]
    want = both(*arguments)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both(*arguments)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = both(*arguments)
    for each in got:
        each.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, want))
    with fusednorm.sm_margin(16):
        assert all(map(torch.equal, both(*arguments), want))


@pytest.mark.parametrize("norm", NORMS)
def test_rows_have_the_same_bits_beside_any_others_if_they_must(norm):
    both, _ = functions(norm)
    given = tensors((4096, 4096))
    x, residual, *parameters = [given[name] for name in NAMES]
    with fusednorm.batch_invariant():
        want = both(x, residual, *parameters)
        for few in (1, 7, 1000):
            got = both(x[:few], residual[:few], *parameters)
            assert all(torch.equal(ours, each[:few]) for ours, each in zip(got, want, strict=True))
