"""The parts of the bench of chains that need no GPU."""

from __future__ import annotations

import pytest
import torch

from bench import chains
from bench.candidates import CANDIDATES
from bench.cases import make_bench_inputs, plain_case
from fusednorm.tools.oracle import exact


def chains_of(chain: str, direction: str, norm: str = "layer"):
    """(the chain's calls, the inputs, the case). ATen has no backward of RMSNorm on a CPU."""
    case = plain_case(norm, (6, 96), "fp64")
    inputs = make_bench_inputs(case, "cpu")
    names = ("fusednorm", "aten") if norm == "layer" else ("fusednorm",)
    calls = {name: CANDIDATES[name].prepare(case, inputs) for name in names}
    norms = chains.norms_of(calls, direction, inputs)
    return chains.chain_calls(chain, norms, chains.written_before(direction, inputs)), inputs, case


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("chain", chains.CHAINS)
def test_every_candidate_ends_a_chain_with_the_same_numbers_and_the_norm_in_it(chain, direction, norm):
    calls, inputs, case = chains_of(chain, direction, norm)
    ends = {name: call().clone() for name, call in calls.items()}
    if "aten" in ends:
        torch.testing.assert_close(ends["fusednorm"], ends["aten"])
    assert not torch.allclose(ends["fusednorm"], ends["floor"])
    if chain != "matmul":
        want = exact(case, inputs).y if direction == "forward" else exact(case, inputs).dx
        torch.testing.assert_close(ends["fusednorm"], -want if chain == "elementwise" else want)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_neighbours_write_what_the_norm_reads_and_read_what_it_writes(direction):
    calls, inputs, _ = chains_of("matmul", direction)
    written = chains.written_before(direction, inputs)
    before = written.clone()
    without = calls[chains.WITHOUT]().clone()
    assert not torch.equal(written, before)  # by the first product
    written.zero_()
    again = calls[chains.WITHOUT]()
    assert torch.equal(again, without)
    assert not torch.equal(calls["fusednorm"](), without)


@pytest.mark.parametrize("chain, count", [("alone", 1), ("four", 4), ("elementwise", 1), ("matmul", 1)])
def test_a_chain_has_one_norm_or_four(chain, count):
    seen = []
    calls = chains.chain_calls(chain, {"a": lambda: seen.append(1) or torch.ones(6, 96)}, torch.ones(6, 96))
    calls["a"]()
    assert len(seen) == count
    assert (chains.WITHOUT in calls) == (chain in ("elementwise", "matmul"))


def test_the_table_shows_the_norms_own_time():
    cell = {"norm": "rms", "rows": 6, "cols": 96}
    four = cell | {"chain": "four", "fusednorm_us": 40.0, "floor_us": 36.0}
    among = cell | {"chain": "matmul", "fusednorm_us": 40.0, "floor_us": 36.0, "without_norm_us": 10.0}
    names = ["fusednorm", "cudnn", "floor"]
    assert chains.row_of(four, names) == ["rms 6x96", "four", "10.0", "", "9.0"]
    assert chains.row_of(among, names) == ["rms 6x96", "matmul", "30.0", "", "26.0"]


def test_without_a_gpu_it_says_so_and_ends_with_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chains.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
