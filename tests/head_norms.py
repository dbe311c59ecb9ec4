"""Norms of q and k as tests call them, and as models write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fusednorm
from bench.written import finished, normalized
from fusednorm.forms import FormSpec

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
EPS = 2.0**-12


@dataclass(frozen=True)
class HeadCase:
    """q [B, S, heads, D] and k [B, S, kv_heads, D], or with heads_first [B, heads, S, D]."""

    cols: int = 16
    heads: int = 4
    kv_heads: int = 2
    batch: int = 2
    tokens: int = 5
    dtype: torch.dtype = FP64
    weight_dtype: torch.dtype | None = None  # by default that of q and k
    norm: str = "rms"
    weights: bool = True
    rotary: int = 0  # columns
    interleaved: bool = False
    norm_first: bool = True
    half_table: bool = False  # cos and sin have an entry for each pair
    heads_first: bool = False
    whole: bool = False  # a weight for all heads
    weight_offset: float = 0.0
    table_dims: str = "S"  # or "BS", or "BSH1": as they are passed
    table_dtype: torch.dtype = FP32  # of what is not float64
    packed: bool = False  # what is compiled takes q and k from one tensor with v, and copies v's gradient

    def tensors(self, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
        generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

        def make(*shape: int, dtype: torch.dtype | None) -> Tensor:
            drawn = torch.randn(shape, generator=generator, device=device, dtype=FP64)
            return (drawn + 0.3).to(dtype or self.dtype)

        made = {}
        for name, heads in (("q", self.heads), ("k", self.kv_heads)):
            middle = (heads, self.tokens) if self.heads_first else (self.tokens, heads)
            made[name] = make(self.batch, *middle, self.cols, dtype=self.dtype)
        if self.weights:
            names = "q_weight", "k_weight", *(("q_bias", "k_bias") if self.norm == "layer" else ())
            counts = {"q": self.heads, "k": self.kv_heads} if self.whole else {"q": 1, "k": 1}
            made |= {name: make(counts[name[0]] * self.cols, dtype=self.weight_dtype) for name in names}
        return {name: each.requires_grad_() for name, each in made.items()}

    def tables(self, device: str = "cpu") -> tuple[Tensor, Tensor] | None:
        """cos and sin. Both columns of a pair have other values, unless half_table: no model's have, but the formula
        allows it."""
        if not self.rotary:
            return None
        dims = {"S": (self.tokens,), "BS": (self.batch, self.tokens)}.get(self.table_dims)
        if dims is None:
            dims = (self.batch, 1, self.tokens) if self.heads_first else (self.batch, self.tokens, 1)
        width = self.rotary // 2 if self.half_table else self.rotary
        angles = torch.randn(*dims, width, generator=torch.Generator().manual_seed(1), dtype=FP64)
        dtype = FP64 if self.dtype is FP64 else self.table_dtype
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "norm": self.norm,
            "eps": EPS,
            "rotary_dim": self.rotary or None,
            "rotary_interleaved": self.interleaved,
            "norm_first": self.norm_first,
            "weight_offset": self.weight_offset,
        }

    def run(self, given: dict[str, Tensor], **more: Any) -> tuple[Tensor, Tensor]:
        more = {"heads_dim": -3 if self.heads_first else -2} | self.settings | more
        if "rotary" not in more:
            more["rotary"] = self.tables(str(given["q"].device))
        return fusednorm.qk_norm(**given, **more)

    def composite(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """As models write it, in the dtypes of the tensors."""
        return self.of(given, "q"), self.of(given, "k")

    def of(self, given: dict[str, Tensor], name: str) -> Tensor:
        x, steps = given[name], [lambda h: self.normalized(h, given, name), self.turned]
        h = x if x.dtype == FP64 else x.float()
        for step in steps if self.norm_first else steps[::-1]:
            h = step(h)
        return h.to(x.dtype)

    def normalized(self, h: Tensor, given: dict[str, Tensor], name: str) -> Tensor:
        swapped = self.whole and self.heads_first
        h = h.transpose(1, 2) if swapped else h
        h = h.flatten(-2) if self.whole else h
        x_hat, _, _ = normalized(self.norm, h, EPS)
        parameters = {kind: given.get(f"{name}_{kind}") for kind in ("weight", "bias")}
        h = finished(x_hat, FormSpec(weight_offset=self.weight_offset), parameters, h.dtype)
        h = h.unflatten(-1, (-1, self.cols)) if self.whole else h
        return h.transpose(1, 2) if swapped else h

    def turned(self, h: Tensor) -> Tensor:
        tables = self.tables(str(h.device))
        if tables is None:
            return h
        cos, sin = (each.to(h.dtype) for each in tables)
        if self.table_dims != "BSH1":
            cos, sin = (each.unsqueeze(-3 if self.heads_first else -2) for each in (cos, sin))
        if self.half_table:
            cos, sin = (torch.stack([t, t], -1).flatten(-2) if self.interleaved else torch.cat([t, t], -1)
                        for t in (cos, sin))  # fmt: skip
        out, r = h.clone(), self.rotary
        at = (slice(0, r, 2), slice(1, r, 2)) if self.interleaved else (slice(0, r // 2), slice(r // 2, r))
        a, b = (h[..., each] for each in at)
        out[..., at[0]] = a * cos[..., at[0]] - b * sin[..., at[0]]
        out[..., at[1]] = b * cos[..., at[1]] + a * sin[..., at[1]]
        return out


def without_formulas(monkeypatch) -> None:
    """No formula runs in place of a kernel."""
    from fusednorm import reference
    from fusednorm.heads.operands import OPS

    for name in OPS:
        monkeypatch.delitem(reference.FORMULAS, name)


def calls_of(case: HeadCase) -> list:
    """The forward and the backward that qk_norm describes for tensors like the case's, with every gradient wanted."""
    from fusednorm.heads import call, functional
    from fusednorm.heads.problem import Packing

    given, named = case.tensors("meta"), case.settings | {"heads_dim": -3 if case.heads_first else -2}
    forward, packed, packing = functional.operands(**given, rotary=case.tables("meta"), **named), None, None
    if case.packed:
        packing, width = Packing(case.heads, case.kv_heads), (case.heads + 2 * case.kv_heads) * case.cols
        packed = torch.empty(case.batch, case.tokens, width, dtype=case.dtype, device="meta")
    return [each for way in call.both_ways(forward, packed, packing) for each in call.calls_of(way)]


def launches_of(case: HeadCase, arch: int) -> list:
    """(plan, launch) of what the calls launch on an architecture."""
    from planning import EVERY_ARCHITECTURE

    from fusednorm.heads import launch, plan

    device = EVERY_ARCHITECTURE[arch]
    planned = [(call, plan.choose(call.problem, device)) for call in calls_of(case)]
    return [(chosen, each) for call, chosen in planned for each in launch.launches_of(call, chosen, device, 0)[0]]


def complaints(case: HeadCase, arch: int) -> list[str]:
    """Where the compiler's builds differ from what the plans expect, in a process that does not interpret."""
    from bench.resources import resources

    found = []
    for plan, launch in launches_of(case, arch):
        used, most = resources(launch, arch), launch.options.get("maxnreg", 255)
        if used.stack_bytes or used.registers > most:
            of_it = f"{used.registers} registers of {most}, {used.stack_bytes} bytes of stack"
            found.append(f"{launch.kernel.__name__} by {plan} takes {of_it}")
    return found


def builds_of(cases: list[HeadCase], arch: int) -> list[list[str]]:
    from fusednorm.tools.compilation import build_key

    return [[build_key(launch, arch) for _, launch in launches_of(case, arch)] for case in cases]


def shared_bytes_of_forward(case: HeadCase, arch: int) -> int:
    from bench.resources import resources

    return resources(launches_of(case, arch)[0][1], arch).shared_bytes


def carried_halves(case: HeadCase, arch: int) -> int:
    """How many values of 16 bits the loop of the backward carries."""
    from fusednorm.tools import compilation

    backward = next(each for _, each in launches_of(case, arch) if each.kernel.__name__ == "backward")
    return len(re.findall(r"= phi (?:bfloat|half|i16) ", compilation.compile_for(backward, arch).asm["llir"]))


def gradients(outputs, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    saws = [torch.arange(each.numel(), device=each.device) % 13 - 6 for each in outputs]  # exact in every dtype
    grads = [(saw / 8).reshape(each.shape).to(each.dtype) for saw, each in zip(saws, outputs, strict=True)]
    return torch.autograd.grad(outputs, list(given.values()), grads)


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.detach().double() - exact.detach().double()).square().mean().sqrt())


def assert_errs_no_more_than_plain_code(
    case: HeadCase, given: dict[str, Tensor], got: tuple[Tensor, ...], of_got: tuple[Tensor, ...] = ()
) -> None:
    """Outputs and gradients, by default those of autograd, against float64 autograd of the plain code."""
    exact = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    plain, want = case.composite(given), case.composite(exact)
    assert [(each.dtype, each.shape) for each in got] == [(each.dtype, each.shape) for each in plain]
    assert all(each.is_contiguous() for each in got)
    grads = of_got or gradients(got, given), gradients(plain, given), gradients(want, exact)
    assert [each.dtype for each in grads[0]] == [each.dtype for each in given.values()]
    accumulated = 4 * torch.finfo(FP64 if case.dtype == FP64 else FP32).eps  # sums in another order
    for ours, theirs, right in (*zip(got, plain, want, strict=True), *zip(*grads, strict=True)):
        least = max(torch.finfo(ours.dtype).eps * 1e-2, accumulated) * float(right.detach().abs().amax())
        assert error(ours, right) <= 1.1 * error(theirs, right) + least
    for ours, right in zip((*got, *grads[0]), (*want, *grads[2]), strict=True):  # a single wrong row or column shows
        bound = 4 * torch.finfo(ours.dtype).eps + 64 * accumulated
        assert ((ours.double() - right).abs() <= bound * (1 + right.abs().amax())).all()


# The sizes of models, to compile.
OF_MODELS = [
    HeadCase(cols=128, heads=32, kv_heads=8, tokens=64, dtype=BF16, rotary=128, table_dims="BS", packed=True),
    HeadCase(cols=128, heads=16, kv_heads=2, tokens=64, dtype=BF16),
    HeadCase(cols=64, heads=14, kv_heads=2, tokens=64, dtype=FP16, norm="layer", rotary=32, heads_first=True),
    HeadCase(cols=256, heads=16, kv_heads=2, tokens=64, dtype=BF16, rotary=64, weight_offset=1.0),
    HeadCase(cols=128, heads=24, kv_heads=24, tokens=64, dtype=BF16, rotary=128, interleaved=True),
    HeadCase(cols=128, heads=40, kv_heads=8, tokens=64, dtype=BF16, rotary=128, norm_first=False, weights=False),
    HeadCase(cols=96, heads=8, kv_heads=8, tokens=64, dtype=FP32, rotary=96, norm="layer", norm_first=False),
    HeadCase(cols=512, heads=8, kv_heads=1, tokens=64, dtype=BF16, weight_dtype=FP32, rotary=64, interleaved=True),
    HeadCase(cols=80, heads=32, kv_heads=32, tokens=64, dtype=BF16, rotary=32, half_table=True, packed=True),
    HeadCase(cols=64, heads=4, kv_heads=4, tokens=64, dtype=FP64, rotary=64),
    HeadCase(cols=128, heads=32, kv_heads=8, tokens=64, dtype=BF16, rotary=128, table_dtype=BF16, norm="layer",
             packed=True),
    HeadCase(cols=256, heads=16, kv_heads=2, tokens=64, dtype=FP16, rotary=256, table_dtype=FP16, norm="layer"),
    HeadCase(cols=256, heads=16, kv_heads=2, tokens=64, dtype=BF16, rotary=256, table_dtype=BF16, interleaved=True),
    HeadCase(cols=256, heads=16, kv_heads=2, tokens=64, dtype=BF16, rotary=256, table_dtype=BF16, norm="layer",
             interleaved=True, half_table=True),
]  # fmt: skip
WHOLE_OF_MODELS = [  # OLMo 2 of 1, 7, 13 and 32 billion parameters, Wan 2.1 of 1.3 and 14
    *(HeadCase(cols=128, heads=q, kv_heads=k, tokens=64, dtype=BF16, rotary=128, table_dims="BS", whole=True)
      for q, k in ((16, 16), (32, 32), (40, 40), (40, 8))),
    *(HeadCase(cols=128, heads=heads, kv_heads=heads, tokens=64, dtype=BF16, rotary=128, interleaved=True, whole=True)
      for heads in (12, 40)),
]  # fmt: skip
CASES = [
    HeadCase(),
    HeadCase(norm="layer", rotary=16),
    HeadCase(cols=16, rotary=16, half_table=True, table_dims="BS"),
    HeadCase(cols=24, rotary=8, heads_first=True),
    HeadCase(cols=20, rotary=12, interleaved=True, table_dims="BSH1"),
    HeadCase(cols=16, rotary=16, norm_first=False, weight_offset=1.0),
    HeadCase(cols=18, rotary=6, interleaved=True, half_table=True, norm_first=False, norm="layer", heads_first=True),
    HeadCase(cols=40, rotary=40, weights=False, norm_first=False, table_dims="BSH1", heads_first=True),
    HeadCase(cols=80, rotary=32, heads=3, kv_heads=1),
    HeadCase(cols=64, rotary=32, norm="layer", norm_first=False, table_dtype=BF16),
]
WHOLE = [  # what models have, and the other orders
    HeadCase(rotary=16, whole=True),
    HeadCase(rotary=8, whole=True, norm="layer", heads_first=True, weight_offset=1.0),
    HeadCase(rotary=8, whole=True, norm_first=False, interleaved=True),
    HeadCase(whole=True, heads_first=True),
    HeadCase(cols=20, rotary=12, heads=5, kv_heads=5, whole=True, norm="layer"),
    HeadCase(cols=16, rotary=16, heads=3, kv_heads=1, whole=True, half_table=True, table_dims="BSH1", heads_first=True),
]
