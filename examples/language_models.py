"""What the examples share: two small language models over bytes, GPT-2's architecture (LayerNorm) and Llama's
(RMSNorm), and a text for them, the topics of Python's own help()."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusednorm

BYTES = 256  # the vocabulary
MODELS = {"gpt2": True, "llama": False}  # whether a model is GPT-2's kind


class Norms(NamedTuple):
    layer: type[nn.LayerNorm]
    rms: type[nn.RMSNorm]


STOCK, OURS = Norms(nn.LayerNorm, nn.RMSNorm), Norms(fusednorm.LayerNorm, fusednorm.RMSNorm)


@dataclass(frozen=True)
class Size:
    width: int
    blocks: int
    heads: int
    length: int  # bytes of text in a sequence
    batch: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length


class Attention(nn.Module):
    """Attention over the heads that the projections give: all heads, or those of one rank."""

    def __init__(self, size: Size, bias: bool, rotary: bool, causal: bool = True) -> None:
        super().__init__()
        self.head_width, self.rotary, self.causal = size.width // size.heads, rotary, causal
        self.query, self.key, self.value, self.out = (nn.Linear(size.width, size.width, bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.by_head(project(x)) for project in (self.query, self.key, self.value))
        if self.rotary:
            q, k = rotate(q), rotate(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def by_head(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [batch, heads, length, head_width]


def rotary_tables(length: int, half: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary positions, [length, half]."""
    frequencies = 10000.0 ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor) -> Tensor:
    """Rotary positions: dim i of a head's first half and dim i of its second half are rotated as a pair."""
    cos, sin = (each.to(x.dtype) for each in rotary_tables(x.shape[-2], x.shape[-1] // 2, x.device))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class GPT2MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class LlamaMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, size: Size, norms: Norms, gpt2: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = (make_norm(size, norms, gpt2) for _ in range(2))
        self.attention = Attention(size, bias=gpt2, rotary=not gpt2)
        self.mlp = GPT2MLP(size.width) if gpt2 else LlamaMLP(size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def make_norm(size: Size, norms: Norms, gpt2: bool) -> nn.Module:
    return norms.layer(size.width) if gpt2 else norms.rms(size.width, eps=1e-5)


class Embedding(nn.Module):
    def __init__(self, size: Size, positions: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, size.width)
        self.position = nn.Embedding(size.length, size.width) if positions else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        if self.position is None:
            return x
        return x + self.position(torch.arange(tokens.shape[1], device=tokens.device)[None])


class LanguageModel(nn.Module):
    """Maps [batch, length] tokens to the logits of the next token, by embed, blocks, norm and head."""

    def __init__(self, name: str, size: Size, norms: Norms) -> None:
        super().__init__()
        gpt2 = MODELS[name]
        self.embed = Embedding(size, positions=gpt2)
        self.blocks = nn.Sequential(*(Block(size, norms, gpt2) for _ in range(size.blocks)))
        self.norm = make_norm(size, norms, gpt2)
        self.head = nn.Linear(size.width, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def help_text() -> Tensor:
    """The 460 KB of help() on the Python language, as bytes."""
    text = "\n\n".join(pydoc_data.topics.topics.values()).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(text: Tensor, size: Size, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (tokens, targets) of random passages forever, [batch, length] each. Equal seeds give equal passages."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(size.length + 1)
    while True:
        starts = torch.randint(len(text) - size.length, (size.batch, 1), generator=generator)
        passages = text[starts + offsets].long()
        yield passages[:, :-1], passages[:, 1:]
