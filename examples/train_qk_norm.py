"""What this shows: a small Llama that normalizes queries and keys, as Qwen3 and Gemma 3 do, learns as well when these
norms and the rotation behind them are one call. Prints tokens/s and memory, and draws loss curves.

    python -m examples.train_qk_norm

q, k and v are slices of one projection. Written out, two norms and two rotations read and write q and k, and autograd
adds up three gradients of the projection. QKNorm reads the slices in place, in one launch. qk_norm_packed writes one
gradient, v's part included. On a CPU our functionals call ATen, so that all three compute the same, but for roundings,
and the curves coincide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusednorm

from .language_models import OURS, LanguageModel, Size, batches, help_text, rotary_tables, rotate
from .training import arguments, only_process, report, train

EPS = 1e-6


class Heads(NamedTuple):
    q: int
    kv: int  # of k, and of v
    width: int

    def slices(self, packed: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, `[batch, length, heads, width]`."""
        return packed.unflatten(-1, (-1, self.width)).split((self.q, self.kv, self.kv), dim=-2)

    def tables(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_tables(packed.shape[1], self.width // 2, packed.device)


class WrittenOut(nn.Module):
    """Like the others, maps a packed projection to q and k, normalized and rotated, and v."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.heads, self.q_norm, self.k_norm = heads, *(nn.RMSNorm(heads.width, EPS) for _ in range(2))

    def forward(self, packed: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.heads.slices(packed)
        q, k = (rotate(y.transpose(1, 2)).transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k)))
        return q, k, v


class BySlices(nn.Module):
    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.heads, self.norm = heads, fusednorm.QKNorm(heads.width, EPS, rotary_dim=heads.width)

    def forward(self, packed: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.heads.slices(packed)
        return *self.norm(q, k, self.heads.tables(packed)), v


class Packed(BySlices):
    def forward(self, packed: Tensor) -> tuple[Tensor, ...]:
        heads, norm, tables = self.heads, self.norm, self.heads.tables(packed)
        return fusednorm.qk_norm_packed(
            packed, heads.q, heads.kv, norm.q_weight, norm.k_weight, EPS, rotary=tables, rotary_dim=heads.width
        )


class Attention(nn.Module):
    """Four heads of q share one of k and v."""

    def __init__(self, size: Size, norms: type[nn.Module]) -> None:
        super().__init__()
        heads = Heads(size.heads, size.heads // 4, size.width // size.heads)
        self.project = nn.Linear(size.width, (heads.q + 2 * heads.kv) * heads.width, bias=False)
        self.norms, self.out = norms(heads), nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in self.norms(self.project(x)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def main(given: Sequence[str] | None = None) -> None:
    asked = arguments("train_qk_norm", __doc__, given)
    device, size = only_process()
    runs = {}
    for label, norms in {"written out": WrittenOut, "QKNorm": BySlices, "packed": Packed}.items():
        torch.manual_seed(0)
        model = LanguageModel("llama", size, OURS)
        for block in model.blocks:
            block.attention = Attention(size, norms)
        runs[label] = train(model.to(device), batches(help_text(), size), asked.steps)
    print(f"{size.tokens} tokens a step")
    report(runs, size.tokens, asked.out / "train_qk_norm.png")


if __name__ == "__main__":
    main()
