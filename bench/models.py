"""Stacks of transformer blocks as people write them, of torch.nn alone: GPT-2's (LayerNorm) and Llama's (RMSNorm)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT2Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, bias=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        hidden = 8 * width // 3 // 64 * 64 or 64
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Stack(nn.Module):
    """Blocks and a last norm: [batch, length, width] to the same."""

    def __init__(self, block: type[nn.Module], depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width) if block is GPT2Block else nn.RMSNorm(width, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(x))


BLOCKS: dict[str, type[nn.Module]] = {"gpt2": GPT2Block, "llama": LlamaBlock}


def make_stack(name: str, depth: int, width: int, heads: int, **where: torch.device | torch.dtype | str) -> Stack:
    torch.manual_seed(0)
    return Stack(BLOCKS[name], depth, width, heads).to(**where)
