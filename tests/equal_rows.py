"""Rows of equal elements: their mean is the element, x_hat is 0, so y is the bias, and dx knows only the gradient."""

from __future__ import annotations

import torch

from fusednorm.tools.oracle import Case, Inputs, Outputs

WEIGHT = 3.0  # the same in all columns, so that weight * dy is constant along a row where dy is


def equal_rows(case: Case, device: str = "cpu") -> Inputs:
    """Inputs of a LayerNorm of [rows, cols]. Every row of x repeats a large element; dy is constant along every second
    row, and its sum is rounded if dy is float32."""
    rows, cols = case.shape
    generator = torch.Generator().manual_seed(rows * cols)
    element = 100 + 50_000 * torch.rand(rows, 1, generator=generator, dtype=case.acc_dtype)
    dy = torch.randn(rows, cols, generator=generator)
    dy[::2] = torch.arange(1.0, 2 + rows)[: len(dy[::2]), None].remainder(7) - 3
    if (case.grad_dtype or case.x_dtype) == torch.float32:
        dy[::2] = torch.rand(len(dy[::2]), 1, generator=generator)

    def parameter(value: float, dtype: torch.dtype | None) -> torch.Tensor | None:
        return None if dtype is None else torch.full((cols,), value, dtype=dtype, device=device)

    return Inputs(
        element.to(device, case.x_dtype).expand(rows, cols).contiguous(),
        dy.to(device, case.grad_dtype or case.x_dtype),
        parameter(WEIGHT, case.weight_dtype),
        parameter(0.625, case.bias_dtype),
    )


def assert_exact(outputs: Outputs, case: Case, inputs: Inputs) -> None:
    """Exact: y, mean, dweight, and dx where it is 0. dx of other rows is near rstd * (g - mean(g))."""
    if outputs.y is not None:
        want = torch.zeros_like(inputs.x) if inputs.bias is None else inputs.bias.to(case.x_dtype).expand(case.shape)
        assert torch.equal(outputs.y, want)
    if outputs.mean is not None:
        assert torch.equal(outputs.mean.flatten(), inputs.x[:, 0].to(case.acc_dtype))
        rstd = torch.full((case.rows,), case.eps, dtype=torch.float64, device=inputs.x.device).rsqrt()
        torch.testing.assert_close(outputs.rstd.flatten().double(), rstd, rtol=1e-6, atol=0)
    if outputs.dweight is not None:
        assert not outputs.dweight.any(), f"dweight has elements up to {outputs.dweight.abs().max().item():.3g}, not 0"
    if outputs.dx is not None:
        g = inputs.grad_out.double() * (1 if inputs.weight is None else WEIGHT)
        want = (g - g.mean(1, keepdim=True)) * case.eps**-0.5
        zero = outputs.dx if case.shape[1] == 1 else outputs.dx[::2]
        assert not zero.any(), f"dx has elements up to {zero.abs().max().item():.3g}, not 0"
        tolerance = case.eps**-0.5 * g.abs().max().item() * 2**-20
        torch.testing.assert_close(outputs.dx.double(), want, rtol=torch.finfo(case.x_dtype).eps, atol=tolerance)
