"""Random small models for random_graphs.py: norms, what may surround them, and what must not be joined, as text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch import Tensor

from fusednorm.integrations.rewriting import JOINS

DTYPES = {"FP64": torch.float64, "FP32": torch.float32, "BF16": torch.bfloat16}
Sizes = dict[str, int]  # B samples of S rows of C columns, and H heads of D columns


@dataclass(frozen=True)
class Leaf:
    """An input of the model."""

    shape: str
    dtype: str
    layout: str
    has_gradient: bool

    def made(self, sizes: Sizes) -> Tensor:
        shape = eval(f"({self.shape}{',' * bool(self.shape)})", dict(sizes))
        made = torch.randn(shape).to(DTYPES[self.dtype])
        if self.layout == "turned" and made.dim() > 1:
            made = made.mT.contiguous().mT
        elif self.layout == "slice" and shape:
            made = torch.cat([made, made], -1)[..., : shape[-1]]
        elif self.layout == "expanded" and shape:
            made = made[:1].expand(shape)
        elif self.layout == "zero row" and shape:
            made[:1] = 0
        return made


@dataclass(frozen=True)
class Piece:
    """Lines that make `y` of `x`, both [B, S, C]."""

    x: str
    y: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    leaves: dict[str, Leaf]
    pieces: tuple[Piece, ...]
    sizes: tuple[Sizes, ...]  # of each call
    joins: tuple[str, ...]
    is_checkpointed: bool
    seed: int

    @property
    def text(self) -> str:
        lines = [f"def model({', '.join(self.leaves)}):", "    outs = []"]
        lines += [f"    {line}" for piece in self.pieces for line in piece.lines]
        return "\n".join([*lines, f"    return [*outs, {self.pieces[-1].y}]"])

    def without(self, at: int) -> Case:
        piece = self.pieces[at]
        empty = replace(piece, lines=(f"{piece.y} = {piece.x} * 1",))
        return replace(self, pieces=(*self.pieces[:at], empty, *self.pieces[at + 1 :]))

    def __str__(self) -> str:
        leaves = "\n".join(f"# {name}: {leaf}" for name, leaf in self.leaves.items() if self.text.count(name) > 1)
        return f"{leaves}\n# {self.sizes}, join={self.joins}, checkpoint={self.is_checkpointed}\n{self.text}"


@dataclass
class Draw:
    """What draws a case."""

    random: Random
    dtype: str
    leaves: dict[str, Leaf] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)  # lines behind the piece
    count: int = 0

    def any(self, *of: str) -> str:
        return self.random.choice(of)

    def may(self, chance: float = 0.1) -> bool:
        return self.random.random() < chance

    def leaf(self, shape: str, narrow: float = 0.7, usual: float = 0.85, trained: float = 0.88) -> str:
        name = f"in{len(self.leaves)}"
        dtype = self.dtype if self.may(narrow) else self.any("FP32", self.dtype)
        layout = "" if self.may(usual) else self.any("turned", "slice", "expanded", "zero row")
        self.leaves[name] = Leaf(shape, dtype, layout, self.may(trained))
        return name

    def let(self, made: str) -> str:
        """The name of a new value."""
        self.count += 1
        self.lines.append(f"v{self.count} = {made}")
        return f"v{self.count}"

    def wide(self, x: str) -> str:
        return x + self.any(".float()", ".to(FP32)", ".to(torch.float32)", ".type(FP32)", ".to(dtype=FP32)")

    def maybe_wide(self, x: str, chance: float = 0.4) -> str:
        return self.wide(x) if self.may(chance) else x

    def like(self, x: str, of: str) -> str:
        return x + self.any(f".to({of}.dtype)", f".type_as({of})", f".to({of})")

    def maybe_like(self, x: str, of: str, chance: float = 0.5) -> str:
        return self.like(f"({x})", of) if self.may(chance) else x

    def product(self, a: str, b: str) -> str:
        return self.any(f"{a} * {b}", f"{b} * {a}", f"torch.mul({a}, {b})" if self.may() else f"{a} * {b}")

    def total(self, a: str, b: str) -> str:
        return self.any(f"{a} + {b}", f"{b} + {a}")

    def disturbed(self, x: str, chance: float = 0.05) -> str:
        """Now and then something that a join has to respect."""
        if not self.may(chance):
            return x
        lines = [f"outs.append({x})", f"{x}.mul_(1.5)", f"{x}[...].mul_(0.5)", "torch._dynamo.graph_break()",
                 f"with torch.no_grad(): outs.append({x} * 2)"]  # fmt: skip
        later = [f"outs.append({x}.detach())", f"{x}.mul_(0.25)"]
        values = [f"{x}.detach()", f"{x}.clone()", f"F.dropout({x}, 0.0)", f"{x}.mT.contiguous().mT",
                  f"{x}.view({x}.shape)", f"{x}.to(BF16)"]  # fmt: skip
        drawn = self.any(*lines, *later, *values)
        if drawn in values:
            return self.let(drawn)
        (self.after if drawn in later else self.lines).append(drawn)
        return x

    def norm(self, x: str, cols: str = "C", how: tuple[int, ...] = ()) -> str:
        """how: a seed, to spell two norms alike."""
        before, self.random = self.random, Random(*how) if how else self.random
        kind = self.any("F.rms", "F.layer", "rms", "rms", "rms", "layer")
        weight = None if self.may(0.2) else self.leaf(cols, usual=1.0)
        if kind == "F.rms":
            y = self.let(f"F.rms_norm({x}, ({cols},), {weight}, 1e-6)")
        elif kind == "F.layer":
            bias = self.any("None", weight or "None")
            y = self.let(f"F.layer_norm({x}, ({cols},), {weight}, {bias}, 1e-6)")
        else:
            h = self.let(self.wide(x) if self.dtype != "FP64" and not self.may(0.2) else x)
            if kind == "layer":
                h = self.let(f"{h} - {h}.mean(-1, keepdim=True)")
            square = self.any(f"{h}.pow(2)", f"{h}.square()", f"({h} * {h})", f"({h} ** 2)", f"torch.square({h})")
            mean = self.disturbed(self.let(f"{square}.mean({self.any('-1', 'dim=-1')}, keepdim=True)"), 0.01)
            rstd = self.any(f"torch.rsqrt({mean} + 1e-6)", f"({mean} + 1e-6).rsqrt()", f"({mean} + 1e-6) ** -0.5")
            y = self.disturbed(self.let(self.product(h, rstd)), 0.02)
            y = self.let(self.maybe_like(y, x))
            if weight:
                wide = self.maybe_wide(weight)
                factor = self.any(wide, wide, f"(1 + {wide})", f"({wide} + 1.0)")
                y = self.let(self.product(factor, y))
                y = self.let(self.maybe_like(y, x))
        self.random = before
        return y

    def piece_norm(self, x: str) -> str:
        y = self.norm(self.disturbed(x))
        return self.let(f"{x} + {y}" if self.may(0.5) else y)

    def piece_plain(self, x: str) -> str:
        return self.let(self.any(f"{x}.sin()", f"F.gelu({x})", f"{x} @ {self.leaf('C, C', 1, 1)}.to({x}.dtype) / 6",
                                 f"{x}.tanh() * 2", f"{x}.detach() + 1", f"F.dropout({x}, 0.0)"))  # fmt: skip

    def sum(self, x: str, gate: str | None) -> str:
        residual = self.leaf("B, S, C") if self.may(0.7) else x
        branch = x if residual != x else self.leaf("B, S, C")
        residual, branch = (residual, branch) if self.may(0.5) else (branch, residual)
        if gate is None:
            made = self.total(residual, branch)
        elif self.may(0.15):
            made = f"torch.addcmul({residual}, {gate}, {branch})"
        else:
            made = self.total(self.maybe_wide(residual), f"({self.product(self.maybe_wide(gate), branch)})")
        return self.disturbed(self.let(self.maybe_like(f"{made}", residual, 0.3)), 0.12)

    def modulations(self, x: str, count: int) -> list[str]:
        """Tensors that broadcast against x."""
        late = f" * {x}.float().mean((1, 2))[:, None, None]" if self.may() else ""
        kind = self.any("apart", "apart", "table", "table", "wide", "tokens", "shared")
        if kind == "table":
            table = self.let(self.maybe_wide(self.leaf("B, 6, C"), 0.3) + late)
            if self.may(0.3):
                table = self.let(f"{self.leaf('1, 6, C')} + {table}")
            return self._parts_of(table)[:count]
        if kind == "wide":
            parts = self.let(f"{self.leaf('B, 6 * C')}.chunk(6, dim={self.any('1', '-1')})")
            view = self.any("[:, None]", ".unsqueeze(1)", "[:, None, :]")
            return [f"{parts}[{at}]{view}" for at in self.random.sample(range(6), count)]
        if kind == "tokens":
            parts = self.let(f"{self.leaf('B, S, 6 * C')}.chunk(6, dim=-1)")
            return [f"{parts}[{at}]" for at in self.random.sample(range(6), count)]
        shapes = ["B, C", "B, C", "B, 1, C", "B, S, C", "1, 1, C"]
        if self.may(0.25):
            shapes = ["", "C", "1", "B, S, 1", "B, 1, 1", "1, S, C", "S, C", "1, C"]
        shape = self.any(*shapes)
        found = [self.leaf(shape if self.may(0.8) else self.any(*shapes)) for _ in range(count)]
        found = [found[0]] * count if kind == "shared" else found
        views = "[:, None]", ".unsqueeze(1)", f".unsqueeze(1).expand(-1, {x}.shape[1], -1)"
        is_short = lambda each: self.leaves[each].shape == "B, C"  # noqa: E731
        return [each + self.any(*views[: 3 if self.may() else 2]) if is_short(each) else each for each in found]

    def _parts_of(self, table: str) -> list[str]:
        way = self.any("chunk", "slice", "select", "unbind", "view")
        if way in ("chunk", "unbind"):
            parts = self.let(f"{table}.{way}({'6, ' * (way == 'chunk')}{self.any('1', 'dim=1')})")
            return [f"{parts}[{at}]{'[:, None]' * (way == 'unbind')}" for at in range(6)]
        texts = {"slice": "{0}[:, {1}:{1} + 1]", "select": "{0}[:, {1}, None]",
                 "view": "{0}[:, {1}].view(-1, 1, {0}.shape[-1])"}  # fmt: skip
        return [texts[way].format(table, at) for at in self.random.sample(range(6), 6)]

    def piece_modulated(self, x: str) -> str:
        scale, shift, gate = self.modulations(x, 3)
        h = x if self.may(0.3) else self.sum(x, gate if self.may(0.6) else None)
        if self.may(0.4):
            self.lines.append(f"outs.append({h})")
        y = self.disturbed(self.norm(self.maybe_wide(h, 0.2)))
        scale, shift = self.maybe_wide(scale, 0.3), self.maybe_wide(shift, 0.3)
        factor = self.any(f"(1 + {scale})", f"({scale} + 1)", f"(1.0 + {scale})")
        factor = self.any(scale, f"(2 + {scale})") if self.may(0.07) else factor
        if self.may(0.2):
            made = f"torch.addcmul({shift}, {y}, {factor})"
        else:
            made = self.product(y, factor)
            made = self.total(self.disturbed(self.let(made), 0.04), shift) if self.may(0.8) else made
        y = self.let(self.maybe_like(made, h))
        return self.let(f"{h} + {y}") if self.may(0.4) else y

    def piece_behind(self, x: str) -> str:
        (gate,) = self.modulations(x, 1)
        residual = x if self.may(0.4) else self.leaf("B, S, C")
        gate = self.any(gate, f"{gate}.tanh()", f"torch.tanh({gate})")
        y = self.disturbed(self.norm(x))
        if self.may(0.2):
            return self.let(f"torch.addcmul({residual}, {gate}, {y})")
        return self.let(self.maybe_like(self.total(residual, f"({self.product(gate, y)})"), residual))

    def piece_gated(self, x: str) -> str:
        gate = self.leaf("B, S, C") if self.may(0.9) else self.any(x, self.leaf(self.any("B, 1, C", "B, S, 1", "C")))
        if self.may(0.2):
            wide = self.let(f"{self.leaf('B, S, 2 * C')}.chunk(2, -1)")
            gate = f"{wide}[0]"
        gate = self.maybe_wide(gate)
        act = self.any("F.silu({})", "F.silu({})", "torch.sigmoid({})", "{}.sigmoid()", "torch.tanh({})").format(gate)
        act = self.disturbed(self.let(act)) if self.may(0.5) else act
        if self.may(0.5):
            y = self.disturbed(self.norm(x))
            return self.let(self.maybe_like(self.product(y, act), x))
        h = self.disturbed(self.let(self.product(self.maybe_wide(x), act)))
        groups = self.any("1", "1", "4")
        if groups == "1":
            return self.let(self.maybe_like(self.norm(h), x))
        h = self.let(f"{self.wide(h)}.view(*{h}.shape[:-1], {groups}, -1)")
        h = self.let(f"{h} * torch.rsqrt({h}.pow(2).mean(-1, keepdim=True) + 1e-6)")
        h = self.disturbed(self.let(f"{h}.view({x}.shape)"))
        return self.let(f"{self.leaf('C', usual=1.0)} * {self.maybe_like(h, x)}")

    def piece_heads(self, x: str) -> str:
        """Norms of q and k, packed or not, rotated or not."""
        kv = self.any("H", "H", "1")
        if way := self.any("columns", "heads", "slices", "unbind", ""):
            count = f"(H + 2 * {kv})" if way != "unbind" else "(3 * H)"
            kv = "H" if way == "unbind" else kv
            weight = self.leaf(f"{count} * D, C", 1, 1)
            projected = f"F.linear({x}, {weight}.to({x}.dtype) / 6)"
            whole = self.let(projected if self.may(0.8) else self.leaf(f"B, S, {count} * D"))
            if way == "columns":
                sizes = f"[H * D, {kv} * D, {kv} * D]"
                parts = self.let(f"[each.view(*each.shape[:2], -1, D) for each in {whole}.split({sizes}, -1)]")
            elif way == "unbind":
                parts = self.let(f"{whole}.view(*{whole}.shape[:2], 3, H, D).unbind(2)")
            else:
                whole = self.let(f"{whole}.unflatten(-1, ({count}, D))")
                slices = f"{whole}[:, :, :H], {whole}[:, :, H : H + {kv}], {whole}[:, :, H + {kv} :]"
                parts = self.let(f"{whole}.split([H, {kv}, {kv}], dim=2)" if way == "heads" else slices)
            q, k, v = (self.let(f"{parts}[{at}]") for at in range(3))
        else:
            q = self.let(f"{x}.unflatten(-1, (H, D))")
            k, v = (self.leaf(f"B, S, {kv}, D") for _ in "kv")
        swap, turns = self.any("before", "middle", "behind"), self.any("before", "behind", "behind", "never")
        partly = self.any("D", "D", "D", "D // 2")
        shape = self.any("B, S", "1, S", "S")
        cos, sin = (self.leaf(f"{shape}, {partly}", usual=0.9, trained=0.05) for _ in range(2))
        style, how = self.any(*TURNS), (self.random.getrandbits(32),)
        seeds = how if self.may(0.9) else (self.random.getrandbits(32),), how
        is_cast = self.may(0.5)
        found = []
        for each, seed in zip((q, k), seeds, strict=True):
            y = self.let(f"{each}.transpose(1, 2)") if swap == "before" else each
            steps = ["norm", "turn"] if turns == "behind" else ["turn", "norm"] if turns == "before" else ["norm"]
            steps.insert(1, "swap") if swap == "middle" else None
            for step in steps:
                if step == "swap":
                    y = self.let(f"{y}.transpose(1, 2)")
                elif step == "norm":
                    y = self.norm(y, "D", how=seed)
                else:
                    is_first = swap == "before" or (swap == "middle" and steps.index("swap") < steps.index("turn"))
                    y = self.turn(y, cos, sin, style, partly != "D", ".unsqueeze(-3)" if is_first else ".unsqueeze(-2)")
                    y = self.let(self.like(y, each)) if is_cast else y
                y = self.disturbed(y, 0.03)
            found.append(self.let(f"{y}.transpose(1, 2)") if swap == "behind" else y)
        q, k, v = *found, self.let(f"{v}.transpose(1, 2)")
        k, v = (self.let(f"{each}.expand(-1, H, -1, -1)") if kv == "1" else each for each in (k, v))
        if self.may(0.5):
            y = f"F.scaled_dot_product_attention({q}, {k}.to({q}.dtype), {v}.to({q}.dtype))"
        else:
            y = f"{q} * {v} + {k}"
        return self.let(f"({y}).transpose(1, 2).flatten(2)")

    def turn(self, x: str, cos: str, sin: str, style: str, partly: bool, view: str) -> str:
        cos, sin = f"{cos}{view}", f"{sin}{view}"
        if partly:
            x, rest = self.let(f"{x}[..., : D // 2]"), self.let(f"{x}[..., D // 2 :]")
        size = "D // 4" if partly else "D // 2"
        y = self.let(TURNS[style].format(x=x, cos=cos, sin=sin, half=size, wide=self.maybe_wide(x, 0.3)))
        return self.let(f"torch.cat([{y}, {rest}], dim=-1)") if partly else y


TURNS = {
    "halves": "{x} * {cos} + torch.cat([-{x}[..., {half} :], {x}[..., : {half}]], dim=-1) * {sin}",
    "backward": "{x} * {cos} + torch.cat([{x}.chunk(2, -1)[1], -{x}.chunk(2, -1)[0]], -1) * {sin}",
    "chunks": "({x} * {cos}) + (torch.cat([-{x}.chunk(2, -1)[1], {x}.chunk(2, -1)[0]], -1) * {sin})",
    "by halves": "(lambda a, b, c, s: torch.cat([a * c - b * s, b * c + a * s], -1))"
                 "(*{x}.chunk(2, -1), {cos}[..., : {half}], {sin}[..., : {half}])",
    "pairs": "(lambda a, b: {wide} * {cos} + torch.stack([-b, a], -1).flatten(3) * {sin})"
             "(*{x}.reshape(*{x}.shape[:-1], -1, 2).unbind(-1))",
    "unbound": "(lambda a, b: {wide} * {cos} + torch.cat([-b, a], -1) * {sin})"
               "(*{x}.reshape(*{x}.shape[:-1], 2, -1).unbind(-2))",
}  # fmt: skip
PIECES = {"modulated": 4, "behind": 2, "gated": 3, "heads": 4, "norm": 2, "plain": 1}


def drawn(seed: int, number: int) -> Case:
    random = Random(f"{seed} {number}")
    draw = Draw(random, random.choice(["FP32", "FP32", "BF16", "FP64"]))
    pool, pieces = [draw.leaf("B, S, C")], []
    if random.random() < 0.5:  # an activation, which in-place code may change
        pieces.append(Piece(pool[0], "h", (f"h = {pool[0]} * 1",)))
        pool = ["h"]
    for _ in range(random.choice([1, 2, 2, 3])):
        x = pool[-1] if random.random() < 0.85 else random.choice(pool)
        kind = random.choices([*PIECES], [*PIECES.values()])[0]
        y = draw.disturbed(getattr(draw, f"piece_{kind}")(x))
        pieces.append(Piece(x, y, (*draw.lines, *draw.after)))
        pool.append(y)
        draw.lines, draw.after = [], []
    heads = random.choice([1, 2, 4])
    size = {"B": random.choice([1, 2, 3]), "S": random.choice([1, 4, 6, 6]), "D": random.choice([8, 8, 8, 260])}
    sizes = [size | {"H": heads, "C": heads * size["D"]}]
    if random.random() < 0.15:
        sizes.append(sizes[0] | {"B": size["B"] + 1, "S": size["S"] + 2})
    joins = JOINS if random.random() < 0.9 else tuple(random.sample(JOINS, 2))
    return Case(draw.leaves, tuple(pieces), tuple(sizes), joins, random.random() < 0.08, random.getrandbits(32))
