"""What the CPU tier and the GPU tier share: problems, memory layouts, and buffers that show stray accesses."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import torch
from devices import named, planned_for
from torch import Tensor

from bench.written import normalized
from fusednorm.host import native, torch_compat
from fusednorm.tools.oracle import Case, Inputs

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NORMS = ("layer", "rms")
EPS = 2.0**-16  # Triton's interpreter makes every float argument a float32, which holds this one exactly

# (x, weight and bias, grad_out)
SAME_DTYPES = [(dtype, dtype, dtype) for dtype in (BF16, FP16, FP32, FP64)]
MIXED_DTYPES = [
    (BF16, FP32, BF16),
    (FP16, FP32, FP16),
    (BF16, BF16, FP32),
    (FP32, BF16, FP32),
    (FP32, FP32, BF16),
    (FP64, BF16, FP16),
    (FP16, FP64, BF16),
    (BF16, None, FP32),
]

# Row lengths that have broken normalization kernels before. Tests run them in every dtype, with this number of rows.
TROUBLED_ROWS = 216
TROUBLED_WIDTHS = (3, 32, 96, 576, 768, 1024, 1280, 1600, 1984, 1987, 65536)


def make_case(norm: str, shape: tuple[int, ...], dtypes=(BF16, BF16, BF16), normalized_ndim: int = 1) -> Case:
    x, parameter, grad = dtypes
    return Case(norm, shape, normalized_ndim, x, parameter, parameter if norm == "layer" else None, grad, EPS)


def rotate(shapes, dtypes) -> list[Case]:
    """Each shape with each norm. The cases take the mixes of dtypes in turn, not each of them."""
    return [
        make_case(norm, shape, mix)
        for (shape, norm), mix in zip(itertools.product(shapes, NORMS), itertools.cycle(dtypes))
    ]


# Layouts: each takes a [B, S, H, D] tensor and returns its elements in the same shape, with other strides. The memory
# between the elements holds NaN: a stray read shows in the results.
def row_strided(tensor: Tensor) -> Tensor:
    padded = _nans((*tensor.shape[:-1], tensor.shape[-1] + 8), tensor)
    view = padded[..., : tensor.shape[-1]]
    return view.copy_(tensor)


def unaligned(tensor: Tensor) -> Tensor:
    """Every row starts at an odd element: only loads of one element are aligned."""
    padded = _nans((*tensor.shape[:-1], tensor.shape[-1] + 1 + tensor.shape[-1] % 2), tensor)
    view = padded[..., 1 : 1 + tensor.shape[-1]]
    return view.copy_(tensor)


def packed_slice(tensor: Tensor) -> Tensor:
    """The middle of three tensors in one buffer: the rows lie at two nested strides."""
    b, s, *row = tensor.shape
    return _nans((b, s, 3, *row), tensor)[:, :, 1].copy_(tensor)


def heads_first(tensor: Tensor) -> Tensor:
    """Stored as [B, H, S, D]: rows at two nested strides for B = 1, at three otherwise, which the ops must copy."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def columns_first(tensor: Tensor) -> Tensor:
    """The elements of a row are not adjacent: the ops must copy."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def repeated_row(tensor: Tensor) -> Tensor:
    """The first row in place of all rows, at stride 0."""
    return tensor[:1, :1, :1].expand(tensor.shape)


def repeated_element(tensor: Tensor) -> Tensor:
    """The first element in place of all, at stride 0: the gradient of a sum arrives like this."""
    return tensor[:1, :1, :1, :1].expand(tensor.shape)


Layout = Callable[[Tensor], Tensor]
LAYOUTS: dict[str, tuple[int, Layout, Layout]] = {  # B, layout of x, layout of grad_out
    "row_strided": (2, row_strided, row_strided),
    "unaligned": (2, unaligned, unaligned),
    "packed_slice": (2, packed_slice, packed_slice),
    "packed_slice_of_x_only": (2, packed_slice, Tensor.contiguous),
    "packed_slice_of_grad_only": (2, Tensor.contiguous, packed_slice),
    "heads_first": (1, heads_first, packed_slice),
    "three_strides": (2, heads_first, heads_first),
    "columns_first": (2, columns_first, columns_first),
    "repeated_row": (2, row_strided, repeated_row),
    "repeated_element": (2, packed_slice, repeated_element),
}


def lay_out(inputs: Inputs, layout: str) -> Inputs:
    """The inputs of a [B, S, H, D] case, with x and grad_out in a layout of LAYOUTS."""
    _, of_x, of_grad = LAYOUTS[layout]
    return replace(inputs, x=of_x(inputs.x), grad_out=of_grad(inputs.grad_out))


# Layouts of (mean, rstd), by the names in statistic_layouts: the two may differ.
STATISTIC_LAYOUTS = [("[M]", "[M]"), ("[M, 1]", "strided"), ("strided", "[M]"), ("strided [M, 1]", "strided [M, 1]")]


def statistic_layouts(statistic: Tensor) -> dict[str, Tensor]:
    """The same statistic ([M]) in every layout in which a caller may pass it."""
    flat = statistic.flatten()
    strided = _nans((flat.numel(), 3), flat)[:, 1].copy_(flat)
    return {"[M]": flat, "[M, 1]": flat[:, None], "strided": strided, "strided [M, 1]": strided[:, None]}


def statistics_of(norm: str, h: Tensor) -> dict[str, Tensor]:
    """Those of rows that a backward takes, by name."""
    _, mean, rstd = normalized(norm, h.double(), EPS)
    return {"rstd": rstd.float()} | ({} if mean is None else {"mean": mean.float()})


MARGIN = 64  # elements: keeps every buffer as aligned as the allocator made it


@contextlib.contextmanager
def guarded_buffers() -> Iterator[list[Tensor]]:
    """Inside, the ops allocate buffers full of NaN, with margins of NaN around them.

    An element that is read before it is written, or never written, shows as NaN in the results. On leaving, the margins
    must still be NaN: a write beyond either end fails. Yields the list of the buffers, margins included.
    """
    buffers: list[Tensor] = []
    full = torch.full

    def guarded(*size, **options) -> Tensor:
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        buffers.append(full((shape.numel() + 2 * MARGIN,), float("nan"), **options))
        return buffers[-1][MARGIN:-MARGIN].view(shape)

    def guarded_like(tensor: Tensor) -> Tensor:
        return guarded(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def guarded_by_launches(shape, strides, dtype) -> Tensor:
        return guarded(shape, dtype=dtype, device="cuda")

    native.forget()  # the C++ host side repeats known calls and allocates for them without these functions
    with (
        mock.patch.object(torch, "empty", guarded),
        mock.patch.object(torch, "empty_like", guarded_like),
        mock.patch.object(torch_compat, "allocate", guarded_by_launches),
    ):
        yield buffers
    for buffer in buffers:
        assert buffer[:MARGIN].isnan().all(), f"a write before the start of a buffer of {buffer.numel() - 2 * MARGIN}"
        assert buffer[-MARGIN:].isnan().all(), f"a write past the end of a buffer of {buffer.numel() - 2 * MARGIN}"


def outputs_of(call, plan) -> tuple[Tensor | None, ...]:
    """The outputs of a norm's call by a plan, interpreted: on two SMs, so that CTAs have several tiles, and with
    guarded_buffers."""
    from fusednorm.host import launch

    with planned_for(named("A100", 2)), guarded_buffers():
        prepared = launch.on_tensors(call, plan)
        for each in prepared.launches:
            each.run()
    return prepared.outputs


def _nans(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)
