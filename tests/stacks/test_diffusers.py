"""Diffusers' transformers in the graphs of torch.compile: their norms, modulated and of q and k, become ours."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tracing import as_cuda, trace

diffusers = pytest.importorskip("diffusers", reason="needs the package diffusers: make test-integrations")
HEADS, DIM, TOKENS, TEXT = 2, 16, 24, 8
WIDTH = HEADS * DIM
SIZES = {"num_attention_heads": HEADS, "attention_head_dim": DIM}


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def flux():
    more = {"joint_attention_dim": WIDTH, "in_channels": 16, "pooled_projection_dim": WIDTH}
    more |= {"axes_dims_rope": (4, 6, 6)}
    model = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=2, **SIZES, **more)
    positions = torch.arange(TOKENS)[:, None].expand(-1, 3).float(), torch.zeros(TEXT, 3)
    given = {"hidden_states": normal(2, TOKENS, 16), "encoder_hidden_states": normal(2, TEXT, WIDTH)}
    given |= {"pooled_projections": normal(2, WIDTH), "timestep": torch.full((2,), 0.5)}
    return model, given | {"img_ids": positions[0], "txt_ids": positions[1]}


def wan():
    more = {"in_channels": 4, "out_channels": 4, "text_dim": WIDTH, "freq_dim": 16, "ffn_dim": 64}
    model = diffusers.WanTransformer3DModel(num_layers=2, cross_attn_norm=True, **SIZES, **more)
    given = {"hidden_states": normal(2, 4, 2, 8, 8), "encoder_hidden_states": normal(2, TEXT, WIDTH)}
    return model, given | {"timestep": torch.full((2,), 500)}


def stable_diffusion_3():
    more = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 8}
    more |= {"pooled_projection_dim": WIDTH, "joint_attention_dim": WIDTH}
    more |= {"caption_projection_dim": WIDTH, "qk_norm": "rms_norm"}
    model = diffusers.SD3Transformer2DModel(num_layers=2, **SIZES, **more)
    given = {"hidden_states": normal(2, 4, 8, 8), "encoder_hidden_states": normal(2, TEXT, WIDTH)}
    return model, given | {"pooled_projections": normal(2, WIDTH), "timestep": torch.full((2,), 500)}


def ops_of(graphs):
    """How often each of our ops is called."""
    called = (node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function")
    return Counter(each._opname for each in called if getattr(each, "namespace", "") == "fusednorm")


@pytest.mark.parametrize(("make", "modulated", "heads"), [(flux, 7, 2), (wan, 5, 2), (stable_diffusion_3, 8, 0)])
def test_norms_of_transformers_are_found_and_have_the_gradients_of_eager_mode(make, modulated, heads):
    torch.manual_seed(0)
    model, given = make()
    with as_cuda():
        traced = trace(model, fullgraph=False)
        (found,) = traced(**given, return_dict=False)
        found.square().mean().backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    (exact,) = model(**given, return_dict=False)
    exact.square().mean().backward()
    torch.testing.assert_close(found, exact)
    for name, each in model.named_parameters():
        torch.testing.assert_close(gradients[name], each.grad, rtol=1e-3, atol=1e-6, msg=name)
    ops = ops_of(traced.backwards)
    assert ops["layer_norm_bwd_modulated"] == modulated and ops["head_norm_bwd"] == heads
