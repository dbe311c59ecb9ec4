"""The graphs that Inductor would compile, without its code generation: joint trace, our pass, partition."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node

from bench.graphs import errors
from fusednorm.integrations import folding, rewriting, routing


@contextlib.contextmanager
def as_cuda():
    """Routes CPU tensors, and gives them the fused RMSNorm that ATen has for CUDA tensors."""
    before, routing.DEVICE_TYPES = routing.DEVICE_TYPES, ("cpu",)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", lambda *args: torch.ops.fusednorm.rms_norm_fwd(*args), "CPU")
    library.impl("_fused_rms_norm_backward", lambda *args: torch.ops.fusednorm.rms_norm_bwd(*args), "CPU")
    torch.ops.aten._fused_rms_norm.default._dispatch_cache.clear()  # else the op does not find the new kernel
    try:
        yield
    finally:
        routing.DEVICE_TYPES = before
        library._destroy()
        torch.ops.aten._fused_rms_norm.default._dispatch_cache.clear()  # else the op still finds the removed kernel


@pytest.fixture
def cpu_as_cuda():
    with as_cuda():
        yield


@dataclass
class Traced:
    """The graphs of one torch.compile, in order of compilation; call it as the model."""

    forwards: list[GraphModule] = field(default_factory=list)
    backwards: list[GraphModule] = field(default_factory=list)
    model: Callable | None = None

    def __call__(self, *args, **named):
        return self.model(*args, **named)

    @property
    def backward(self) -> GraphModule:
        (graph,) = self.backwards
        return graph

    @property
    def forward(self) -> GraphModule:
        (graph,) = self.forwards
        return graph


def trace(model: Callable, stock: bool = False, join: str | Iterable[str] = "all", **settings) -> Traced:
    """The model compiled, as one graph by default, with what enable_inductor(join=join) does to graphs, but without
    code generation; settings are torch.compile's. stock: with what Inductor does by itself."""
    traced = Traced()
    backend = backend_of(traced, stock, join)
    traced.model = torch.compile(model, backend=backend, **{"fullgraph": True} | settings)
    return traced


def results(model: Callable, given: list[Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of all that want one; zeros where there is none. Upstream are the same numbers in
    every dtype."""
    made = model(*given)
    made = [made] if isinstance(made, Tensor) else made
    torch.manual_seed(1)
    dys = [torch.randn(each.shape).bfloat16().to(each) for each in made]
    leaves = [each for each in given if each.requires_grad]
    grads = torch.autograd.grad(made, leaves, dys, allow_unused=True, materialize_grads=True)
    return [*(each.detach() for each in made), *grads]


def assert_alike(traced: Callable, model: Callable, given: list[Tensor], atol: float = 1e-5, rtol: float = 1e-5):
    """Both have the same results, which are returned."""
    got, want = results(traced, given), results(model, given)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)
    return got, want


def assert_as_exact(traced: Callable, model: Callable, given: list[Tensor], slack: float = 1e-6, wide=torch.float64):
    """The results, which are returned, are as near to those in a wide dtype as the model's own."""
    got, stock = results(traced, given), results(model, given)
    exact = results(model, [each.detach().to(wide).requires_grad_(each.requires_grad) for each in given])
    for ours, theirs in zip(errors(got, exact), errors(stock, exact), strict=True):
        assert ours <= 1.05 * theirs + slack
    assert [each.dtype for each in got] == [each.dtype for each in stock]
    return got, stock


def backend_of(traced: Traced, stock: bool = False, join: str | Iterable[str] = "all") -> Callable:
    joins = rewriting.joins_of(join)

    def keep(graphs: list[GraphModule], graph: GraphModule, inputs: list) -> Callable:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def fold_and_partition(graph: GraphModule, inputs: list, **options):
        folding.fold(graph.graph, joins)
        graph.graph.lint()
        return min_cut_rematerialization_partition(graph, inputs, **options)

    def fold_and_keep(graph: GraphModule, inputs: list) -> Callable:
        if not stock:
            folding.fold(graph.graph, joins)
        return keep(traced.forwards, graph, inputs)

    def compile(graph: GraphModule, inputs: list) -> Callable:
        compiler = aot_autograd(
            fw_compiler=functools.partial(keep, traced.forwards),
            inference_compiler=fold_and_keep,
            bw_compiler=functools.partial(keep, traced.backwards),
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition if stock else fold_and_partition,
        )
        return compiler(graph, inputs)

    def backend(graph: GraphModule, inputs: list) -> Callable:
        if stock:
            return compile(graph, inputs)
        with routing.decompositions_replaced(folding.makes_any(joins)):
            return rewriting.compiled(graph, lambda: compile(graph, inputs), joins)

    return backend


def calls(graph: GraphModule | torch.fx.Graph, name: str) -> list[Node]:
    """The calls of an op such as "fusednorm.layer_norm_bwd" or "aten.add.Tensor"."""
    nodes = (graph.graph if isinstance(graph, GraphModule) else graph).nodes
    return [node for node in nodes if str(node.target).removesuffix(".default") == name]
