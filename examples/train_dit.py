"""What this shows: a small diffusion transformer (DiT) whose norms take gates, residuals and modulations learns as one
that writes these out does, eager and compiled. Prints tokens/s and memory, and draws loss curves.

    python -m examples.train_dit
    python -m examples.train_dit --compile       each a second time, by torch.compile

Bytes of a text have codes, fixed vectors. The model learns which way leads from noise to the codes of a passage (Lipman
et al., "Flow matching for generative modeling", 2023). On a CPU our functionals call ATen, so that both ways compute
the same, and the curves coincide; --compile needs a C++ compiler there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusednorm

from .language_models import BYTES, GPT2MLP, Attention, Size, batches, help_text
from .training import arguments, only_process, report, train

EPS = 1e-6
CODE = 32  # numbers that stand for a byte
Norm = Callable[..., Tensor | tuple[Tensor, Tensor]]


def written_norm(
    x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None = None, gate: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """The arguments are those of fusednorm.ada_layer_norm, so are the results."""
    h = x if residual is None else residual + gate[:, None] * x
    y = F.layer_norm(h, h.shape[-1:], eps=EPS) * (1 + scale[:, None]) + shift[:, None]
    return y if residual is None else (y, h)


WRITTEN, FUSED = written_norm, partial(fusednorm.ada_layer_norm, eps=EPS)


class Modulation(nn.Module):
    """`count` vectors for each sample, as slices of one tensor. They are zero at first (Peebles, Xie, "Scalable
    diffusion models with transformers", 2023)."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count, self.linear = count, nn.Linear(width, count * width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        return self.linear(F.silu(condition)).unflatten(-1, (self.count, -1)).unbind(1)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(size, True, True, causal=False), GPT2MLP(size.width)])
        self.modulation = Modulation(size.width, 6)


class DiT(nn.Module):
    """Maps noisy codes and, as their last column, the time to velocities."""

    def __init__(self, size: Size, norm: Norm) -> None:
        super().__init__()
        self.norm, self.width = norm, size.width
        self.embed, self.head = nn.Linear(CODE, size.width), nn.Linear(size.width, CODE)
        self.time = nn.Sequential(nn.Linear(size.width, size.width), nn.SiLU(), nn.Linear(size.width, size.width))
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.blocks)])
        self.modulation = Modulation(size.width, 2)

    def forward(self, noisy: Tensor) -> Tensor:
        stream, condition = self.embed(noisy[..., :-1]), self.time(waves(noisy[:, 0, -1], self.width))
        branch = gate = None  # of the last layer; the next norm adds them to the stream
        for block in self.blocks:
            shift1, scale1, gate1, shift2, scale2, gate2 = block.modulation(condition)
            attention, mlp = block.layers
            if branch is None:
                y = self.norm(stream, scale1, shift1)
            else:
                y, stream = self.norm(branch, scale1, shift1, residual=stream, gate=gate)
            y, stream = self.norm(attention(y), scale2, shift2, residual=stream, gate=gate1)
            branch, gate = mlp(y), gate2
        shift, scale = self.modulation(condition)
        y, _ = self.norm(branch, scale, shift, residual=stream, gate=gate)
        return self.head(y)


def waves(time: Tensor, width: int) -> Tensor:
    """Cosines and sines of times between 0 and 1."""
    half = width // 2
    angles = time[:, None] * 1000 * torch.exp(-math.log(10000) * torch.arange(half, device=time.device) / half)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def noisy_passages(size: Size) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (codes mixed with noise and the time, codes - noise) forever."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(BYTES, CODE, generator=generator)
    for tokens, _ in batches(help_text(), size):
        clean = codes[tokens]
        noise = torch.randn(clean.shape, generator=generator)
        time = torch.rand(size.batch, 1, 1, generator=generator)
        noisy = torch.lerp(noise, clean, time)
        yield torch.cat((noisy, time.expand(*tokens.shape, 1)), dim=-1), clean - noise


def main(given: Sequence[str] | None = None) -> None:
    asked = arguments("train_dit", __doc__, given, compile="compiled models, too")
    device, size = only_process()
    runs = {}
    for compiled in (False, True)[: 1 + asked.compile]:
        for label, norm in {"written out": WRITTEN, "fusednorm": FUSED}.items():
            torch.compiler.reset()
            torch.manual_seed(0)
            model = DiT(size, norm).to(device)
            run = train(torch.compile(model) if compiled else model, noisy_passages(size), asked.steps, loss=F.mse_loss)
            runs[f"{label}, compiled" if compiled else label] = run
    print(f"{size.tokens} tokens a step")
    curve = "squared error of a velocity", "A diffusion transformer on Python's help"
    report(runs, size.tokens, asked.out / "train_dit.png", *curve)


if __name__ == "__main__":
    main()
