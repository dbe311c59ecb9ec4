"""Small random models of transformers, from their configs: nothing is downloaded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from bench.turns import let_installed_packages_precede
from fusednorm.tools.oracle import STOCK_FACTOR

# Class of the model, class of its config, number of norms in each layer and outside of them.
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", 2, 1),
    "Mistral": ("MistralForCausalLM", "MistralConfig", 2, 1),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", 4, 1),  # two of them over the dims of a head
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", 2, 1),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", 4, 1),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", 6, 1),
    "Olmo2": ("Olmo2ForCausalLM", "Olmo2Config", 4, 1),  # two of them over all heads
    "T5": ("T5ForConditionalGeneration", "T5Config", 5, 2),  # encoder and decoder layers together
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", 2, 1),
    "Bert": ("BertForMaskedLM", "BertConfig", 2, 2),
}
HEADS, VOCABULARY = 4, 128


def build(name: str, hidden: int = 64, layers: int = 2) -> nn.Module:
    """A model in evaluation mode, without dropout, with random weights in its norms as well. The same on each call."""
    let_installed_packages_precede()  # of which transformers may import Hugging Face's kernels
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    transformers.logging.set_verbosity_error()
    model_class, config_class, *_ = MODELS[name]
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "head_dim": hidden // HEADS,
    }
    if name == "T5":
        sizes = {"d_model": hidden, "d_kv": hidden // HEADS, "d_ff": 2 * hidden, "num_layers": layers}
        sizes |= {"num_heads": HEADS, "decoder_start_token_id": 0}
    elif name == "GPT2":
        sizes = {"n_embd": hidden, "n_layer": layers, "n_head": HEADS}
    config = getattr(transformers, config_class)(vocab_size=VOCABULARY, **sizes)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.2)
    return model


def norm_count(name: str, layers: int = 2) -> int:
    _, _, in_layers, outside = MODELS[name]
    return in_layers * layers + outside


def tokens(device: str = "cpu", rows: int = 2, length: int = 24) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator).to(device)


def loss_and_grads(model: nn.Module, ids: Tensor, called=None) -> dict[str, Tensor]:
    """The loss and the gradient of every parameter, by name; through `called`, such as the compiled model, if given."""
    model.zero_grad(set_to_none=True)
    loss = (model if called is None else called)(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


def in_float64(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """The stock model's results in float64. Steps that its own code casts to float32 still round."""
    return loss_and_grads(copy.deepcopy(model).double(), ids)


def assert_as_good_as_stock(ours: dict, stock: dict, exact: dict, dtype: torch.dtype) -> None:
    """Our loss and gradients have the stock model's dtypes, and are as near to the exact ones up to a factor."""
    eps = torch.finfo(dtype).eps
    assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in stock.items()}
    slack = (2 * eps + 16 * torch.finfo(torch.float32).eps) * norm([exact["loss"]])
    assert distance(ours, exact, ["loss"]) <= 2 * distance(stock, exact, ["loss"]) + slack
    grads = exact.keys() - {"loss"}
    size = norm([exact[name] for name in grads])
    assert distance(ours, exact, grads) <= STOCK_FACTOR * distance(stock, exact, grads) + eps / 4 * size
    for name in grads:  # a looser bound for each alone; size keeps it above 0 for a gradient that is exactly 0
        slack = 2 * eps * (norm([exact[name]]) + size / 100)
        assert distance(ours, exact, [name]) <= 2 * distance(stock, exact, [name]) + slack, name


def distance(a: dict[str, Tensor], b: dict[str, Tensor], names) -> float:
    return norm([a[name].double() - b[name].double() for name in names])


def norm(tensors) -> float:
    return sum(t.double().square().sum().item() for t in tensors) ** 0.5
