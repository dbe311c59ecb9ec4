from __future__ import annotations

from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


class RecordingBackend:
    """A backend for torch.compile that runs graphs as they are and keeps the names of the ops in each."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []
        self._compile = aot_autograd(fw_compiler=self._keep)

    def __call__(self, graph, example_inputs, **options):
        return self._compile(graph, example_inputs, **options)

    def _keep(self, graph, _):
        self.graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    @property
    def ops(self) -> list[str]:
        return [op for graph in self.graphs for op in graph]
