"""The scenarios of test_gpu_company.py. Each runs in a process of its own:  python tests/gpu/company.py SCENARIO

A scenario that hangs is ended with its process. In each, other kernels hold SMs or run beside our backwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from calls import captured, fill_with_nan
from cases import BF16, FP32, make_case
from torch import Tensor

import fusednorm
from bench.holder import Holder
from fusednorm.host import launch
from fusednorm.operands import BackwardOperands
from fusednorm.problem.calls import check_backward
from fusednorm.tools.oracle import Case, Outputs, assert_outputs_close, fused, make_inputs

# Every schedule: narrow and wide rings, clusters, multi-wave, column tiles.
CASES = [
    make_case("layer", (16384, 4096), (BF16, BF16, BF16)),
    make_case("rms", (4096, 4096), (BF16, BF16, BF16)),
    make_case("layer", (65536, 128), (BF16, BF16, BF16)),
    make_case("rms", (2048, 32768), (BF16, BF16, BF16)),
    make_case("layer", (4099, 1000), (FP32, FP32, FP32)),
    make_case("rms", (300, 250001), (BF16, BF16, BF16)),
    make_case("layer", (16, 2048), (BF16, BF16, BF16)),
]
# A cluster of 16 needs 16 free SMs in one group of SMs. It may wait while more than 16 SMs are held, unless a margin
# makes the planner choose smaller clusters.
CLUSTER_OF_16 = make_case("layer", (1024, 65536), (BF16, BF16, BF16))
HELD = (1, 8, 16, 32)


class Backward:
    """A callable backward of a case, and the exact bits that it must give."""

    def __init__(self, case: Case, seed: int = 0):
        self.case, self.inputs = case, make_inputs(case, "cuda", seed)
        self.ahead = fused(case, self.inputs)
        self.wanted = self()
        outputs = Outputs(self.ahead.y, self.ahead.mean, self.ahead.rstd, *self.wanted)
        assert_outputs_close(outputs, case, self.inputs)

    def __call__(self) -> tuple[Tensor, ...]:
        inputs, shape, ops = self.inputs, self.case.normalized_shape, torch.ops.fusednorm
        if self.case.norm == "layer":
            operands = inputs.grad_out, inputs.x, shape, self.ahead.mean, self.ahead.rstd, inputs.weight, inputs.bias
            return ops.layer_norm_bwd(*operands, [True] * 3)
        return *ops.rms_norm_bwd(inputs.grad_out, inputs.x, shape, self.ahead.rstd, inputs.weight, [True] * 2), None

    def assert_right(self, got: tuple[Tensor, ...]) -> None:
        for name, a, b in zip(("dx", "dweight", "dbias"), got, self.wanted, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b), f"{self.case}: {name} has other bits"


def backwards() -> list[Backward]:
    return [Backward(case) for case in CASES]


def run_beside(held: int, call: Callable[[], object], about: object) -> object:
    """The outputs of a call. `held` SMs are held until it is done: a call that waits for them would wait forever."""
    with Holder(held) as holder:
        outputs = call()
        holder.release()
        assert holder.was_told(), f"{about} ended only when the holder of {held} SMs lost its patience"
    return outputs


# ---------------------------------------------------------------------------------------------------- scenarios


def posted_receive() -> None:
    """A kernel holds SMs until after our backward, like a receive that was posted early."""
    calls = backwards()
    for held in HELD:
        for each in calls:
            each.assert_right(run_beside(held, each, each.case))
    wide = Backward(CLUSTER_OF_16)
    for held in (1, 8, 16):
        wide.assert_right(run_beside(held, wide, wide.case))


def posted_receive_in_graphs() -> None:
    for each in backwards():
        graph, outputs = captured(each)
        for held in HELD:
            for output in outputs:
                if output is not None:
                    output.fill_(float("nan"))
            run_beside(held, graph.replay, each.case)
            each.assert_right(outputs)


def forced_variants() -> None:
    for variant in ("multi_wave", "pipelined", "warp_specialized"):
        with fusednorm.force(variant):
            for each in backwards():
                each.assert_right(run_beside(8, each, (variant, each.case)))


def overtaking() -> None:
    """While SMs are held, a kernel that another stream launches after our backward still starts."""
    each, other = Backward(CASES[0]), torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    with Holder(16) as holder:
        got = each()
        with torch.cuda.stream(other):
            x.add_(1)
            holder.release()
        assert holder.was_told()
    each.assert_right(got)
    assert bool((x == 1).all())


def streams() -> None:
    """Backwards on four streams at once, with no SM held and with 16."""
    calls = backwards()
    lanes = [torch.cuda.Stream() for _ in range(4)]
    for held in (0, 16):
        got = []
        with Holder(held) as holder:
            for turn in range(8):
                for at, each in enumerate(calls):
                    with torch.cuda.stream(lanes[(at + turn) % 4]):
                        got.append((each, each()))
            for lane in lanes:
                torch.cuda.current_stream().wait_stream(lane)
            holder.release()
            assert holder.was_told()
        for each, outputs in got:
            each.assert_right(outputs)


def branches_of_a_graph() -> None:
    """A graph whose branches may run side by side, and two graphs at once."""
    calls, lanes = backwards()[:4], [torch.cuda.Stream() for _ in range(4)]

    def all_at_once() -> list:
        outputs = []
        for each, lane in zip(calls, lanes, strict=True):
            lane.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(lane):
                outputs.append(each())
        for lane in lanes:
            torch.cuda.current_stream().wait_stream(lane)
        return outputs

    graphs = [captured(all_at_once) for _ in range(2)]
    with Holder(16) as holder:
        for _ in range(10):
            for (graph, _), lane in zip(graphs, lanes, strict=False):
                with torch.cuda.stream(lane):
                    graph.replay()
        for lane in lanes:
            torch.cuda.current_stream().wait_stream(lane)
        holder.release()
        assert holder.was_told()
    for _, outputs in graphs:
        for each, got in zip(calls, outputs, strict=True):
            each.assert_right(got)


def thousands_of_captures() -> None:
    """Captured calls use up no limited resource: the 4300th gives the bits of the first."""
    each = Backward(make_case("layer", (64, 1024), (BF16, BF16, BF16)))
    graphs = [captured(lambda: [each() for _ in range(100)]) for _ in range(43)]
    for graph, outputs in graphs:
        graph.replay()
        for got in outputs:
            each.assert_right(got)
    each.assert_right(each())
    graph, got = captured(each)
    graph.replay()
    each.assert_right(got)


def memory_pools() -> None:
    """A call allocates in the memory pool of its thread and stream, and keeps nothing there after it."""
    each, pool = Backward(CASES[0]), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        for _ in range(3):
            each.assert_right(each())
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    del pool
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= allocated
    each.assert_right(each())


def deterministic_mode() -> None:
    """torch's deterministic mode fills fresh memory with NaN, which must not show."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for each in backwards():
        each.assert_right(each())


def margins() -> None:
    """Under a margin, as many SMs as it leaves are held. Clusters of 16 must not wait either."""
    for each in (*backwards(), Backward(CLUSTER_OF_16)):
        for held in HELD:
            with fusednorm.sm_margin(held):
                each()  # loads the kernels of this margin's plan: CUDA would wait for an idle GPU
                got = run_beside(held, each, each.case)
            outputs = Outputs(each.ahead.y, each.ahead.mean, each.ahead.rstd, *got)
            assert_outputs_close(outputs, each.case, each.inputs)


def a_second_launch_that_does_not_wait() -> None:
    """The second launch of a backward must wait for the first. Without the wait it reads partials that are still NaN,
    and this test must notice."""
    case = make_case("layer", (4096, 8192), (BF16, BF16, BF16))
    inputs = make_inputs(case, "cuda")
    ahead = fused(case, inputs)
    operands = inputs.grad_out, inputs.x, case.normalized_shape, ahead.mean, ahead.rstd, inputs.weight, inputs.bias
    with fusednorm.force("multi_wave"):
        prepared = launch.on_tensors(check_backward(BackwardOperands("layer", *operands, (True,) * 3)))
    first, last = prepared.launches
    assert last.tile.dependent and last.options["launch_pdl"]
    hasty = replace(last, tile=replace(last.tile, dependent=False))
    for second, is_right in ((last, True), (hasty, False)):
        wrong = 0
        for _ in range(50):
            fill_with_nan(prepared.parts)
            first.run()
            second.run()
            wrong += bool(prepared.outputs[1].isnan().any())
        assert (wrong == 0) == is_right, f"{wrong} of 50 had NaN where the second launch waits: {is_right}"


SCENARIOS = (
    posted_receive, posted_receive_in_graphs, forced_variants, overtaking, streams, branches_of_a_graph,
    thousands_of_captures, memory_pools, deterministic_mode, margins, a_second_launch_that_does_not_wait,
)  # fmt: skip


if __name__ == "__main__":
    {each.__name__: each for each in SCENARIOS}[sys.argv[1]]()
    torch.cuda.synchronize()
    print("right")
