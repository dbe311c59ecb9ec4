"""TransformerEngine is listed so that reports say why it is not timed."""

from __future__ import annotations

NAME = "transformer_engine"
ADDS_RESIDUAL = False


def missing() -> str | None:
    return "its PyTorch extension comes as source only, and building it takes a CUDA toolkit and half an hour"


def prepare(case, inputs):
    raise NotImplementedError(missing())
