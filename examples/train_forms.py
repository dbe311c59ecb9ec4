"""What this shows: small language models whose norms are fused with what surrounds them learn as those written out do.
Prints tokens/s and memory, and draws loss curves.

    python -m examples.train_forms --model pre       Llama's blocks: the residual is added before the norm
    python -m examples.train_forms --model post      Gemma 2's: a second norm behind each layer, then the residual
    python -m examples.train_forms --model gated     BitNet's: as pre, and the MLP normalizes its gated activations
    python -m examples.train_forms --layer-norm --bf16    LayerNorm; layers in bfloat16, beside a float32 stream

All weights are stored minus 1, as Gemma's are, and x_hat is rounded to the dtype of x before them. On a CPU our
functionals call ATen, so that both ways compute the same, and the curves coincide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusednorm

from .language_models import BYTES, Attention, Embedding, LlamaMLP, Size, batches, help_text
from .training import arguments, only_process, report, train

EPS = 1e-5


class Forms(NamedTuple):
    """Functions of (x, residual, weight), or of (x, weight)."""

    norm: Callable[..., Tensor]
    add_norm: Callable[..., tuple[Tensor, Tensor]]  # (norm of the sum, the sum)
    norm_add: Callable[..., Tensor]  # residual + norm of x
    gated: Callable[..., Tensor]  # norm of x * silu(gate), of (gate and x side by side, weight)


def written(norm: str) -> Forms:
    normalize = {"rms": F.rms_norm, "layer": F.layer_norm}[norm]

    def norm_of(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        x_hat = normalize(x.float(), x.shape[-1:], eps=EPS).to(dtype or x.dtype)
        return x_hat * (1 + weight)

    def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return norm_of(total, weight, x.dtype), total

    def norm_add(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return residual + norm_of(x, weight)

    def gated(packed: Tensor, weight: Tensor) -> Tensor:
        gate, x = packed.float().chunk(2, -1)
        return norm_of(x * F.silu(gate), weight, packed.dtype)

    return Forms(norm_of, add_norm, norm_add, gated)


def fused(norm: str) -> Forms:
    names = f"affine_{norm}_norm", f"add_{norm}_norm", f"{norm}_norm_add", f"{norm}_norm_gated_packed"
    settings = {"eps": EPS, "weight_offset": 1.0, "rounding": "x_hat"}
    *functions, packed_norm = (partial(getattr(fusednorm, name), **settings) for name in names)

    def gated(packed: Tensor, weight: Tensor) -> Tensor:
        half = packed.shape[-1] // 2
        (y,) = packed_norm(packed, (half, 2 * half), (0, half), weight, norm_before_gate=False)
        return y

    return Forms(*functions, gated)


class PreNorm(nn.Module):
    """Takes and returns what the last layer adds, and the residual stream that it is added to."""

    def __init__(self, size: Size, forms: Forms) -> None:
        super().__init__()
        self.forms, self.layers = forms, nn.ModuleList([Attention(size, False, True), LlamaMLP(size.width)])
        self.weights = nn.ParameterList([torch.zeros(size.width) for _ in self.layers])

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        for layer, weight in zip(self.layers, self.weights, strict=True):
            y, residual = self.forms.add_norm(x, residual, weight)
            x = layer(y)
        return x, residual


class PostNorm(PreNorm):
    """Likewise; the stream is x, and there is no residual apart from it."""

    def __init__(self, size: Size, forms: Forms) -> None:
        super().__init__(size, forms)
        self.behind = nn.ParameterList([torch.zeros(size.width) for _ in self.layers])

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        for layer, weight, behind in zip(self.layers, self.weights, self.behind, strict=True):
            x = self.forms.norm_add(layer(self.forms.norm(x, weight)), x, behind)
        return x, residual


class GatedMLP(nn.Module):
    def __init__(self, width: int, forms: Forms) -> None:
        super().__init__()
        self.forms, self.weight = forms, nn.Parameter(torch.zeros(2 * width))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.forms.gated(self.up(x), self.weight))


class GatedNorm(PreNorm):
    def __init__(self, size: Size, forms: Forms) -> None:
        super().__init__(size, forms)
        self.layers[1] = GatedMLP(size.width, forms)


BLOCKS = {"pre": PreNorm, "post": PostNorm, "gated": GatedNorm}


class Model(nn.Module):
    def __init__(self, name: str, size: Size, forms: Forms) -> None:
        super().__init__()
        self.forms, self.embed = forms, Embedding(size, positions=False)
        self.blocks = nn.ModuleList([BLOCKS[name](size, forms) for _ in range(size.blocks)])
        self.weight, self.head = nn.Parameter(torch.zeros(size.width)), nn.Linear(size.width, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, residual = self.embed(tokens), None
        for block in self.blocks:
            x, residual = block(x, residual)
        y, _ = self.forms.add_norm(x, residual, self.weight)
        return self.head(y)


def main(given: Sequence[str] | None = None) -> None:
    text = {"layer_norm": "LayerNorm in place of RMSNorm", "bf16": "layers in bfloat16 on a float32 stream"}
    asked = arguments("train_forms", __doc__, given, tuple(BLOCKS), **text)
    device, size = only_process()
    norm, runs = "layer" if asked.layer_norm else "rms", {}
    for label, forms in {"written out": written(norm), "fusednorm": fused(norm)}.items():
        torch.manual_seed(0)
        model = Model(asked.model, size, forms).to(device)
        model.forward = torch.autocast(device.type, torch.bfloat16, enabled=asked.bf16)(model.forward)
        runs[label] = train(model, batches(help_text(), size), asked.steps)
    print(f"{asked.model}, {size.tokens} tokens a step")
    report(runs, size.tokens, asked.out / f"train_forms_{asked.model}.png")


if __name__ == "__main__":
    main()
