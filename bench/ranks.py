"""The processes of a bench that torchrun started, one for each GPU; without torchrun there is one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from examples.training import end_processes


@contextlib.contextmanager
def joined_ranks(dry_run: bool) -> Iterator[tuple[int, int]]:
    """(rank, number of ranks), joined by NCCL, or by gloo in a dry run; (0, 1) without torchrun.

    A rank that fails does not leave the group in order, because that could wait for the others. torchrun ends them.
    """
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks == 1:
        yield 0, 1
        return
    if not dry_run:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if dry_run else "nccl")
    yield dist.get_rank(), ranks
    end_processes()


def largest(*values: float) -> list[float]:
    """The largest of each value over all ranks. Returns on all ranks at about the same time."""
    if not dist.is_initialized():
        return list(values)
    found = torch.tensor(values, dtype=torch.float64, device="cpu" if dist.get_backend() == "gloo" else "cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()
