"""The ops on DTensors: each function with the one parameter `world` is a combination of worlds.py."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from worlds import Log, World, combinations_in, ops_run

import fusednorm
from fusednorm import sharding
from fusednorm.operands import BACKWARDS_OF_FORMS, FORM_OPS, Role
from fusednorm.operands import OPS as TABLE

OPS, ATEN = torch.ops.fusednorm, torch.ops.aten
COLS = 8
MASKS = tuple(mask for mask in itertools.product((True, False), repeat=3) if any(mask))
FP64 = torch.float64  # another order of summing changes results only within the tolerance


def draw(world: World, *shape: int, seed: int) -> Tensor:
    """Random numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(world.device)


# torch 2.11 has only the public way to register rules, and its rules do not compare the costs of redistributions.
TORCH_2_11 = torch.__version__.startswith("2.11.")


class Norms:
    """Operands for all ops, as plain tensors and as DTensors, and checks that both give the same results."""

    def __init__(self, world: World, mesh, placements, shape=(6, 5), grad_placements=None) -> None:
        self.world, self.mesh, self.placements = world, mesh, placements
        self.x, self.dy, self.residual = (draw(world, *shape, COLS, seed=seed) for seed in (1, 2, 3))
        self.w, self.b = (draw(world, COLS, seed=seed) for seed in (4, 5))
        self.dx_placements = placements if grad_placements is None else None  # None: any placements of dx will do
        self.dist_x, self.dist_residual = (distribute_tensor(t, mesh, placements) for t in (self.x, self.residual))
        self.dist_dy = distribute_tensor(self.dy, mesh, grad_placements or placements)
        self.dist_w, self.dist_b = (distribute_tensor(t, mesh, [Replicate()] * mesh.ndim) for t in (self.w, self.b))

    def rows(self, got, want) -> None:
        self.gradient(got, want, self.placements)

    def sums(self, got, want) -> None:
        self.gradient(got, want, [Replicate()] * self.mesh.ndim)

    def gradient(self, got, want, placements) -> None:
        """Of an operand with these placements: sharded as it is, or a partial sum where only x is sharded."""
        self.same(got, want)
        if self.dx_placements and got is not None:
            pairs = zip(self.placements, placements, strict=True)
            expected = [Partial("sum") if isinstance(of_x, Shard) and of_x != own else of_x for of_x, own in pairs]
            assert list(got.placements) == expected, (got.placements, expected)

    def same(self, got, want) -> None:
        assert (got is None) == (want is None)
        if got is not None:
            assert type(got) is DTensor and type(want) is Tensor
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-9, atol=1e-9)

    def check(self, masks=MASKS) -> None:
        shape = (COLS,)
        with Log() as log:
            layer = OPS.layer_norm_fwd(self.dist_x, shape, self.dist_w, self.dist_b, 1e-5)
            rms = OPS.rms_norm_fwd(self.dist_x, shape, self.dist_w, 1e-5)
        assert log.norms() == ["fusednorm.layer_norm_fwd.default", "fusednorm.rms_norm_fwd.default"], log.ops
        plain_layer = OPS.layer_norm_fwd(self.x, shape, self.w, self.b, 1e-5)
        plain_rms = OPS.rms_norm_fwd(self.x, shape, self.w, 1e-5)
        for got, want in zip((*layer, *rms), (*plain_layer, *plain_rms), strict=True):
            self.rows(got, want)
        for op in FORM_OPS:
            run, more = getattr(OPS, op.name), {}
            for name in ("residual", "gate"):
                if op.slot(name) and op.slot(name).role is Role.ROWS:
                    more[name] = self.dist_residual, self.residual
            if op.form.modulate:
                more |= {name: each for name, each in self.modulations().items() if op.slot(name)}
            got, want = (
                run(x, shape, weight=w, bias=b, eps=1e-5, **{name: pair[at] for name, pair in more.items()})
                for at, (x, w, b) in enumerate(((self.dist_x, self.dist_w, self.dist_b), (self.x, self.w, self.b)))
            )
            for ours, theirs in zip(got, want, strict=True):
                self.rows(ours, theirs)
        self.check_backwards_of_forms({"mean": (layer[1], plain_layer[1]), "rstd": (layer[2], plain_layer[2])})
        ours = self.dist_dy, self.dist_x, shape
        theirs = self.dy, self.x, shape
        for mask in masks:
            got = OPS.layer_norm_bwd(*ours, *layer[1:], self.dist_w, self.dist_b, mask)
            self.gradients(got, OPS.layer_norm_bwd(*theirs, *plain_layer[1:], self.w, self.b, mask))
            got = OPS.layer_norm_bwd_residual(
                *ours, *layer[1:], self.dist_w, self.dist_b, self.dist_residual, mask, dx_dtype=torch.float32
            )
            want = OPS.layer_norm_bwd_residual(
                *theirs, *plain_layer[1:], self.w, self.b, self.residual, mask, dx_dtype=torch.float32
            )
            self.gradients(got, want)
            if not any(mask[:2]):
                continue
            got = OPS.rms_norm_bwd(*ours, rms[1], self.dist_w, mask[:2])
            self.gradients(got, OPS.rms_norm_bwd(*theirs, plain_rms[1], self.w, mask[:2]))
            got = OPS.rms_norm_bwd_residual(*ours, rms[1], self.dist_w, self.dist_b, self.dist_residual, mask)
            want = OPS.rms_norm_bwd_residual(*theirs, plain_rms[1], self.w, self.b, self.residual, mask)
            self.gradients(got, want)

    def modulations(self) -> dict[str, tuple[DTensor, Tensor]]:
        """One row for each of x's first dim, one for each row of x, and one for all rows, sharded where x is."""
        made = {}
        for seed, (name, dims) in enumerate({"scale": 1, "shift": 2, "gate": 0}.items(), 6):
            plain = draw(self.world, *self.x.shape[:dims], COLS, seed=seed)
            is_own = [isinstance(p, Shard) and p.dim < dims and self.x.shape[p.dim] > 1 for p in self.placements]
            own = [p if sharded else Replicate() for p, sharded in zip(self.placements, is_own, strict=True)]
            made[name] = distribute_tensor(plain, self.mesh, own), plain
        return made

    def check_backwards_of_forms(self, statistics: dict[str, tuple[DTensor, Tensor]]) -> None:
        rows = self.dist_residual, self.residual
        given = statistics | self.modulations() | {
            "grad_out": (self.dist_dy, self.dy), "x": (self.dist_x, self.x), "weight": (self.dist_w, self.w),
            "bias": (self.dist_b, self.b), **dict.fromkeys(("residual_grad", "branch", "rest"), rows),
        }  # fmt: skip
        places = {"normalized_shape": (COLS,), "width": 3 * COLS, "x_at": COLS, "gate_at": 0}
        for op in BACKWARDS_OF_FORMS:
            pairs = given | ({"gate": rows} if op.slot("gate") and op.slot("gate").role is Role.ROWS else {})
            fixed = {name: value for name, value in places.items() if op.slot(name)}
            got, want = (
                getattr(OPS, op.name)(**fixed, **{name: pair[at] for name, pair in pairs.items() if op.slot(name)})
                for at in (0, 1)
            )
            for output, ours, theirs in zip(op.outputs, got, want, strict=True):
                self.gradient(ours, theirs, pairs[output.like][0].placements)

    def gradients(self, got, want) -> None:
        self.rows(got[0], want[0])
        for each, wanted in zip(got[1:], want[1:], strict=True):
            self.sums(each, wanted)


def rows_sharded_in_any_dim(world: World) -> None:
    mesh = world.mesh()
    for placement in (Shard(0), Shard(1), Replicate()):
        masks = MASKS if placement == Shard(0) else MASKS[:2]
        Norms(world, mesh, [placement], shape=(2 * world.size, 3 * world.size)).check(masks)


def uneven_and_empty_shards(world: World) -> None:
    mesh = world.mesh()
    for rows in (world.size + 1, 1):  # with 1 row, one rank has it and the others are empty
        norms = Norms(world, mesh, [Shard(0)], shape=(rows, 3))
        if rows == 1 and TORCH_2_11:
            norms.dx_placements = None  # it replicates dx if there are fewer rows than ranks
        norms.check(MASKS[:2])
    local = distribute_tensor(draw(world, 1, COLS, seed=0), mesh, [Shard(0)]).to_local()
    assert len(local) == (world.rank == 0)


def meshes_of_two_dims(world: World) -> None:
    mesh = world.mesh(2, 2)
    s0, s1, r = Shard(0), Shard(1), Replicate()
    for placements in ([s0, s1], [s1, s0], [s0, s0], [s0, r], [r, s1]):
        Norms(world, mesh, placements, shape=(4, 8)).check(MASKS[1:3])


def a_partial_gradient_is_added_up_first(world: World) -> None:
    mesh = world.mesh()
    norms = Norms(world, mesh, [Shard(0)], shape=(2 * world.size, 3), grad_placements=[Partial("sum")])
    norms.dist_dy = DTensor.from_local(norms.dy / world.size, mesh, [Partial("sum")])
    norms.check(MASKS[:2])


def without_parameters(world: World) -> None:
    """x is normalized over two dims, one of them sharded, and then over the last dim: there whole rows are sharded."""
    mesh, x = world.mesh(), draw(world, 4, 2 * world.size, COLS, seed=1)
    dist_x = distribute_tensor(x, mesh, [Shard(1)])
    for shape in ((2 * world.size, COLS), (COLS,)):
        y, mean, rstd = OPS.layer_norm_fwd(dist_x, shape)
        want = OPS.layer_norm_fwd(x, shape)
        dx, dw, db = OPS.layer_norm_bwd(dist_x, dist_x, shape, mean, rstd)
        assert dw is None and db is None
        wanted_dx = OPS.layer_norm_bwd(x, x, shape, *want[1:])[0]
        for got, wanted in ((y, want[0]), (mean, want[1]), (rstd, want[2]), (dx, wanted_dx)):
            torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-9, atol=1e-9)
    assert list(y.placements) == list(dx.placements) == [Shard(1)]


def sums_of_columns(world: World) -> None:
    mesh, shape = world.mesh(), (2 * world.size, 3, 2 * world.size)
    inputs = [draw(world, *shape, seed=seed) for seed in (1, 2, 3)]
    for placement, expected in ((Shard(0), Partial("sum")), (Shard(2), Shard(0)), (Replicate(), Replicate())):
        distributed = [distribute_tensor(each, mesh, [placement]) for each in inputs]
        for total in (False, True):
            with Log() as log:
                got = fusednorm.column_sum(distributed, total=total, dtype=FP64)
            assert log.ops.count("fusednorm.column_sum.default") == 1 and not log.collectives()
            want = fusednorm.column_sum(inputs, total=total, dtype=FP64)
            for each, wanted in zip(got, want, strict=True):
                assert list(each.placements) == [expected]
                torch.testing.assert_close(each.full_tensor(), wanted, rtol=1e-9, atol=1e-9)
    parts = [DTensor.from_local(each, mesh, [Partial("sum")]) for each in inputs]
    with Log() as log:
        got = fusednorm.column_sum(parts)
    assert not log.collectives()
    for each, input in zip(got, inputs, strict=True):
        torch.testing.assert_close(each.full_tensor(), world.size * input.sum((0, 1)), rtol=1e-9, atol=1e-9)


def norms_with_tables(world: World) -> None:
    """Sharded along a batch dim, x and its numbers need no collective, and gradients of tables are partial sums."""
    mesh, n = world.mesh(), world.size
    x, dy = draw(world, n, 2 * n, COLS, seed=1), draw(world, n, 2 * n, COLS, seed=2)
    table, index = draw(world, 3, 2, COLS, seed=3), torch.arange(2 * n * n).view(n, 2 * n) % 3

    def gradients(x, table, index, dy):
        x, table = x.requires_grad_(), table.requires_grad_()
        scale, shift = table.unbind(1)
        y = fusednorm.ada_layer_norm(x, scale, shift, index=index)
        return torch.autograd.grad(y, (x, table), dy)

    want = gradients(x.clone(), table.clone(), index, dy)
    for dim in (0, 1):
        pairs = (x, Shard(dim)), (table, Replicate()), (index, Shard(dim)), (dy, Shard(dim))
        given = [distribute_tensor(each, mesh, [place]) for each, place in pairs]
        with Log() as log:
            got = gradients(*given)
        assert log.ops.count("fusednorm.layer_norm_bwd_modulated_by_index.default") == 1 and not log.collectives()
        assert list(got[0].placements) == [Shard(dim)] and list(got[1].placements) == [Partial("sum")]
        for each, wanted in zip(got, want, strict=True):
            torch.testing.assert_close(each.full_tensor(), wanted, rtol=1e-9, atol=1e-9)


def norms_of_heads(world: World) -> None:
    """Sharded along the batch, the tokens or heads of a norm each, q and k need no collective."""
    mesh, n = world.mesh(), world.size
    q, k = (draw(world, n, n, heads * n, COLS, seed=heads) for heads in (2, 1))
    of_batch, of_tokens = (0, (n, n), Shard(0)), (1, (n,), Shard(0))
    of_heads = *((2, (n,), Replicate()), (1, (n, 1, 1), Replicate()), (2, (1, 1, 1), Replicate())),
    cases = [(1, *each) for each in (of_batch, of_tokens, *of_heads)] + [(2 * n, *of_batch), (2 * n, *of_tokens)]
    for heads, dim, table, of_table in cases:
        weight, bias = draw(world, heads * COLS, seed=3), draw(world, heads * COLS, seed=4)
        cos, sin = draw(world, *table, COLS, seed=5), draw(world, *table, COLS, seed=6)
        whole = [each.requires_grad_(at < 4) for at, each in enumerate((q, k, weight, bias, cos, sin))]
        places = [Shard(dim)] * 2 + [Replicate()] * 2 + [of_table] * 2
        parts = [
            distribute_tensor(each.detach(), mesh, [place]).requires_grad_(each.requires_grad)
            for each, place in zip(whole, places, strict=True)
        ]

        def run(q, k, weight, bias, cos, sin):
            outputs = fusednorm.qk_norm(q, k, weight, None, q_bias=bias, norm="layer", rotary=(cos, sin))
            return outputs, torch.autograd.grad(outputs, (q, k, weight, bias), [each.detach() for each in outputs])

        with Log() as log:
            got, grads = run(*parts)
        assert not log.collectives(), log.ops
        assert log.ops.count("fusednorm.head_norm_fwd.default") == 1, log.ops
        assert [list(each.placements)[0] for each in (*got, *grads)] == [Shard(dim)] * 4 + [Partial("sum")] * 2
        want, wanted = run(*whole)
        for each, right in zip((*got, *grads), (*want, *wanted), strict=True):
            torch.testing.assert_close(each.full_tensor(), right, rtol=1e-9, atol=1e-9)


def packed_norms_of_heads(world: World) -> None:
    """Sharded along the batch or the tokens, a tensor of q, k and v needs no collective in its backward."""
    mesh, n = world.mesh(), world.size
    qkv, weight = draw(world, n, 2 * n, 4 * COLS, seed=1), draw(world, COLS, seed=2)
    for dim, table, of_table in ((0, (2 * n,), Replicate()), (1, (2 * n,), Shard(0)), (0, (n, 2 * n), Shard(0))):
        for grouped in (False, True):
            cos, sin = draw(world, *table, COLS, seed=3), draw(world, *table, COLS, seed=4)
            whole = [each.requires_grad_(at < 2) for at, each in enumerate((qkv, weight, cos, sin))]
            places = Shard(dim), Replicate(), of_table, of_table
            parts = [
                distribute_tensor(each.detach(), mesh, [place]).requires_grad_(each.requires_grad)
                for each, place in zip(whole, places, strict=True)
            ]

            def run(qkv, weight, cos, sin, grouped=grouped):
                outputs = fusednorm.qk_norm_packed(qkv, 2, 1, weight, None, rotary=(cos, sin), grouped=grouped)
                return *outputs, *torch.autograd.grad(outputs, (qkv, weight), [each.detach() for each in outputs])

            with Log() as log:
                got = run(*parts)
            assert not log.collectives(), log.ops
            assert log.ops.count("fusednorm.head_norm_bwd_packed.default") == 1, log.ops
            for each, right in zip(got, run(*whole), strict=True):
                torch.testing.assert_close(each.full_tensor(), right, rtol=1e-9, atol=1e-9)


def collectives_are_those_of_atens_rules(world: World) -> None:
    """Sharded rows need no collective. A sharded normalized dim gets the redistribution that ATen's LayerNorm gets."""
    compare_collectives(world, Shard(0), Shard(1), Replicate(), Partial("sum"))


def compare_collectives(world: World, *placements) -> None:
    mesh, shape = world.mesh(), (COLS * world.size,)
    w = distribute_tensor(draw(world, *shape, seed=2), mesh, [Replicate()])
    for placement in placements:
        rows = draw(world, 2 * world.size, *shape, seed=1)
        is_partial = placement == Partial("sum")
        x = DTensor.from_local(rows, mesh, [placement]) if is_partial else distribute_tensor(rows, mesh, [placement])
        counts = []
        for forward, backward in (
            (OPS.layer_norm_fwd, OPS.layer_norm_bwd),
            (ATEN.native_layer_norm, ATEN.native_layer_norm_backward),
        ):
            with Log() as log:
                _, mean, rstd = forward(x, shape, w, w, 1e-5)
                backward(x, x, shape, mean, rstd, w, w, [True, True, True])
            counts.append(log.collectives())
        ours, atens = counts
        assert len(ours) == len(atens) and (ours == atens or TORCH_2_11), (placement, ours, atens)
        assert bool(ours) == (placement in (Shard(1), Partial("sum"))), (placement, ours)


def a_tensor_among_dtensors_gets_torchs_own_error(world: World) -> None:
    x, w = draw(world, 4, COLS, seed=1), draw(world, COLS, seed=2)
    dist_x = distribute_tensor(x, world.mesh(), [Shard(0)])
    for op in (OPS.rms_norm_fwd, ATEN._fused_rms_norm):
        with pytest.raises(RuntimeError, match="got mixed torch.Tensor and DTensor"):
            op(dist_x, (COLS,), w, 1e-5)


def statistics_of_another_shape_are_refused(world: World) -> None:
    norms = Norms(world, world.mesh(), [Replicate()])
    flat = distribute_tensor(draw(world, 30, seed=6), world.mesh(), [Replicate()])
    with pytest.raises(RuntimeError, match=r"rms_norm_bwd: rstd of DTensors must have .* 3 dims, got \(30,\)"):
        OPS.rms_norm_bwd(norms.dist_dy, norms.dist_x, (COLS,), flat, norms.dist_w)


def modules_and_functions_on_dtensors(world: World) -> None:
    """Forward, backward and second derivatives through autograd give what one process gives."""
    mesh = world.mesh()
    for make, way in ((fusednorm.LayerNorm, "layer"), (fusednorm.RMSNorm, "rms")):
        plain, sharded = make(COLS, dtype=FP64, device=world.device), make(COLS, dtype=FP64, device=world.device)
        for name, parameter in list(sharded.named_parameters()):
            replicated = distribute_tensor(parameter.detach(), mesh, [Replicate()])
            sharded.register_parameter(name, torch.nn.Parameter(replicated))
        x, dy = draw(world, 2, 2 * world.size, COLS, seed=1), draw(world, 2, 2 * world.size, COLS, seed=2)
        leaf, dist_dy = (distribute_tensor(each, mesh, [Shard(1)]) for each in (x, dy))
        leaf.requires_grad_()
        plain_leaf = x.clone().requires_grad_()
        with ops_run(world), Log() as log:
            sharded(leaf).backward(dist_dy)
        assert log.norms() == [f"fusednorm.{way}_norm_fwd.default", f"fusednorm.{way}_norm_bwd.default"]
        assert not log.collectives()
        plain(plain_leaf).backward(dy)
        torch.testing.assert_close(leaf.grad.full_tensor(), plain_leaf.grad)
        for (_, mine), (_, theirs) in zip(sharded.named_parameters(), plain.named_parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
        with ops_run(world):
            (dx,) = torch.autograd.grad(sharded(leaf).square().sum(), leaf, create_graph=True)
            (second,) = torch.autograd.grad(dx.square().sum(), leaf)
        (dx,) = torch.autograd.grad(plain(plain_leaf).square().sum(), plain_leaf, create_graph=True)
        (want,) = torch.autograd.grad(dx.square().sum(), plain_leaf)
        torch.testing.assert_close(second.full_tensor(), want)


def the_public_way_to_register_gives_the_same(world: World) -> None:
    with registered(sharding._add_by_public_name):
        rows_sharded_in_any_dim(world)
        Norms(world, world.mesh(), [Shard(0)], shape=(world.size + 1, 3)).check()
        Norms(world, world.mesh(), [Shard(0)], shape=(1, 3), grad_placements=[Shard(0)]).check()  # dx placed anyhow
        a_partial_gradient_is_added_up_first(world)
        without_parameters(world)
        compare_collectives(world, Shard(0), Shard(1), Replicate())


def without_a_rule_torch_says_so(world: World) -> None:
    x = distribute_tensor(draw(world, 4, 6, COLS, seed=1), world.mesh(), [Shard(0)])
    with registered(lambda *_: None):
        for run in (lambda: OPS.rms_norm_fwd(x, (COLS,)), lambda: rows_sharded_in_any_dim(world)):
            with pytest.raises(NotImplementedError, match="does not have a sharding strategy registered"):
                run()
    OPS.rms_norm_fwd(x, (COLS,))


@contextlib.contextmanager
def registered(add) -> Iterator[None]:
    """Inside, `add` registers the norms' sharding rules; all others of the norms are removed."""
    sharding.register()
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = [each for each in vars(propagator).values() if isinstance(each, dict)]
    before = [dict(each) for each in tables]
    ours = [getattr(OPS, name).default for name in TABLE]
    try:
        for op in ours:
            for table in tables:
                table.pop(op, None)
            schema = [argument.name for argument in op._schema.arguments]
            add(op, schema.index("normalized_shape"), ["dx_dtype"] if "dx_dtype" in schema else [])
        forget_what_was_propagated()
        yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.clear()
            table.update(kept)
        forget_what_was_propagated()


def forget_what_was_propagated() -> None:
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


COMBINATIONS = combinations_in(vars(), {uneven_and_empty_shards: (2, 4), meshes_of_two_dims: (4,)})
