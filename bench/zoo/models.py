"""The models: classes of transformers and diffusers at their true widths, in few layers, with random weights.

A model has as large a share of its vocabulary as of its layers, so that embedding and head take the share of a step
that they take in the whole model. Its last norm is left out: it would be one norm of a few where it is one of many.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

IGNORED = -100  # the label of what the loss leaves out
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VOCABULARY_MULTIPLE = 64


@dataclass
class Batch:
    """Arguments of a model. With a target, the loss is the squared error of the output, weighted by sample."""

    arguments: dict[str, Tensor]
    target: Tensor | None = None
    weights: Tensor | None = None  # [batch]

    def loss(self, model: Callable) -> Tensor:
        if self.target is None:
            return model(**self.arguments).loss
        out = model(**self.arguments, return_dict=False)[0]
        return ((out - self.target).square().flatten(1).mean(1) * self.weights).sum()

    def counting_first(self, tokens: int) -> Batch:
        """The same shapes, but the loss is that of `self.first(tokens)`, since no sample depends on another, and in a
        causal model no token on a later one."""
        if self.target is not None:
            only = torch.arange(len(self.weights), device=self.weights.device) == 0
            return replace(self, weights=only.to(self.weights.dtype))
        labels = self.arguments["labels"].clone()
        labels[1:] = IGNORED
        if "input_ids" in self.arguments:
            labels[:, tokens:] = IGNORED
        return replace(self, arguments=self.arguments | {"labels": labels})

    def first(self, tokens: int) -> Batch:
        """The first sample, and of a text that a causal model reads, its first tokens."""
        arguments = {name: t if name in UNBATCHED else t[:1] for name, t in self.arguments.items()}
        if "input_ids" in arguments:
            arguments = {name: t[:, :tokens] for name, t in arguments.items()}
        if self.target is None:
            return Batch(arguments)
        return Batch(arguments, self.target[:1], torch.ones_like(self.weights[:1]))

    def double(self) -> Batch:
        arguments = self.arguments.items()
        return replace(self, arguments={name: t.double() if t.is_floating_point() else t for name, t in arguments})


UNBATCHED = {"img_ids", "txt_ids"}  # FLUX's positions


@dataclass(frozen=True)
class Model:
    """A model of the zoo. `sizes` are its config's values besides the number of layers, `tiny` those of a dry run."""

    title: str
    architecture: str  # a class of `library`
    config: str  # the config's class; "" in diffusers, whose models take the values themselves
    whole: int  # layers of the whole model
    sizes: dict
    tiny: dict
    layers: int = 2
    layers_name: str = "num_hidden_layers"
    types_name: str = "layer_types"  # the config's list of the layers' kinds
    types: tuple[str, ...] = ()
    vocabulary: int = 0  # of the whole model
    batch: int = 2
    length: int = 4096  # tokens of a sample
    last_norms: tuple[str, ...] = ("model.norm",)
    attention: str = "sdpa"
    cudnn_attention: bool = True  # whether torch may choose it
    reduced: str = ""  # what is smaller than in the whole model besides layers and vocabulary, and why
    alone: bool = False  # compiles for minutes, or needs most of the memory
    inputs: Callable[[Model, str], Batch] = field(default=lambda model, device: tokens_of(model, device))

    @property
    def library(self) -> str:
        return "transformers" if self.config else "diffusers"

    @property
    def words(self) -> int:
        """Its share of the vocabulary, rounded up."""
        share = -(-self.vocabulary * self.layers // self.whole)
        return -(-share // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    def values(self) -> dict:
        found = {self.layers_name: self.layers} | self.sizes
        if self.types:
            found[self.types_name] = list(self.types[: self.layers])
        return found | ({"vocab_size": self.words} | SPECIAL if self.vocabulary else {})

    def smaller(self) -> Model:
        """For a dry run."""
        values = dict(self.tiny)
        vocabulary, length = min(self.vocabulary, 128 * self.whole), values.pop("length", 32)
        return replace(self, sizes=self.sizes | values, vocabulary=vocabulary, batch=2, length=length)

    def build(self, device: str, dtype: torch.dtype) -> nn.Module:
        """In training mode. The parameters of its norms are random, too. The same on each call."""
        library = importlib.import_module(self.library)
        torch.manual_seed(0)
        with torch.device(device):
            if self.config:
                config = getattr(library, self.config)(**self.values())
                model = getattr(library, self.architecture).from_config(
                    config, dtype=dtype, attn_implementation=self.attention
                )
            else:
                model = getattr(library, self.architecture)(**self.values())
                kept = set(model._keep_in_fp32_modules or ())  # as from_pretrained(torch_dtype=...) keeps them
                for name, parameter in model.named_parameters():
                    if kept.isdisjoint(name.split(".")):
                        parameter.data = parameter.data.to(dtype)
        for parameter in norm_parameters(model).values():
            parameter.data += 0.1 * torch.randn_like(parameter)
        return model.train()

    def drop_last_norms(self, model: nn.Module) -> None:
        for name in self.last_norms:
            model.get_submodule(name)  # an error, if there is none
            model.set_submodule(name, nn.Identity())


def is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not module._modules


def norm_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    found = {name: module for name, module in model.named_modules() if is_norm(module)}
    return {f"{name}.{each}": p for name, module in found.items() for each, p in module.named_parameters()}


def tokens_of(model: Model, device: str) -> Batch:
    ids = torch.randint(len(SPECIAL), model.words, (model.batch, model.length), device=device)
    labels = ids.clone()  # if they were one tensor here and two in counting_first, the model would be compiled twice
    return Batch({"input_ids": ids, "labels": labels})


def images_of(model: Model, device: str) -> Batch:
    side = model.sizes["image_size"]
    pixels = torch.randn(model.batch, 3, side, side, device=device, dtype=torch.bfloat16)
    return Batch({"pixel_values": pixels, "labels": torch.randint(2, (model.batch,), device=device)})


def speech_of(model: Model, device: str) -> Batch:
    frames = 2 * model.sizes["max_source_positions"]
    features = torch.randn(model.batch, model.sizes["num_mel_bins"], frames, device=device, dtype=torch.bfloat16)
    labels = torch.randint(len(SPECIAL), model.words, (model.batch, model.sizes["max_target_positions"]), device=device)
    return Batch({"input_features": features, "labels": labels})


def flux_of(model: Model, device: str) -> Batch:
    """Latents of an image, and a text of an eighth of its tokens."""
    text = model.length // 8

    def normal(*shape: int) -> Tensor:
        return torch.randn(model.batch, *shape, device=device, dtype=torch.bfloat16)

    latents, channels = normal(model.length, model.sizes["in_channels"]), model.sizes["joint_attention_dim"]
    arguments = {
        "hidden_states": latents,
        "encoder_hidden_states": normal(text, channels),
        "pooled_projections": normal(model.sizes["pooled_projection_dim"]),
        "timestep": torch.full((model.batch,), 0.5, device=device, dtype=torch.bfloat16),
        "img_ids": torch.arange(model.length, device=device)[:, None].expand(-1, 3).float(),
        "txt_ids": torch.zeros(text, 3, device=device),
    }
    return Batch(arguments, torch.randn_like(latents).float(), _even(model, device))


def wan_of(model: Model, device: str) -> Batch:
    """Latents of a video of 60 x 104 pixels, 1560 tokens a frame at patches of 2 x 2, and a text of 512 tokens."""
    height, width = model.sizes["patch_size"][1] * 30, model.sizes["patch_size"][2] * 52
    if model.length < 30 * 52:
        height, width = 8, 8
    frames = max(1, model.length // (height * width // 4))
    shape = model.batch, model.sizes["in_channels"], frames, height, width
    latents = torch.randn(shape, device=device, dtype=torch.bfloat16)
    text = min(512, model.length)
    arguments = {
        "hidden_states": latents,
        "timestep": torch.full((model.batch,), 500, device=device),
        "encoder_hidden_states": torch.randn(
            model.batch, text, model.sizes["text_dim"], device=device, dtype=torch.bfloat16
        ),
    }
    return Batch(arguments, torch.randn(shape, device=device), _even(model, device))


def _even(model: Model, device: str) -> Tensor:
    return torch.full((model.batch,), 1 / model.batch, device=device)


CAUSAL = "AutoModelForCausalLM"
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SCAN = ("fewer tokens and chunks of 16, because the selective scan is transformers' own of plain torch ops (its kernels"
        " are in other packages); the scan takes most of the step")  # fmt: skip

# In the order of their worth: a run whose time is over leaves out the last ones.
MODELS: dict[str, Model] = {
    "llama": Model(
        "Llama 3 8B", CAUSAL, "LlamaConfig", 32, vocabulary=128256, tiny=TINY,
        sizes={"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
               "head_dim": 128, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "qwen3": Model(
        "Qwen3 8B", CAUSAL, "Qwen3Config", 36, vocabulary=151936, tiny=TINY,
        sizes={"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
               "head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "gemma3": Model(
        "Gemma 3 12B", CAUSAL, "Gemma3TextConfig", 48, vocabulary=262208, tiny=TINY,
        types=("sliding_attention", "full_attention"),
        sizes={"hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16, "num_key_value_heads": 8,
               "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 1024},
    ),
    "olmo2": Model(
        "OLMo 2 7B", CAUSAL, "Olmo2Config", 32, vocabulary=100352,
        tiny={name: value for name, value in TINY.items() if name != "head_dim"},
        sizes={"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32,
               "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "qwen3_next": Model(
        "Qwen3-Next 80B", CAUSAL, "Qwen3NextConfig", 48, vocabulary=151936, batch=8, length=1024, alone=True,
        types=("linear_attention", "full_attention"),
        tiny=TINY | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 8,
                     "num_experts_per_tok": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
                     "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        sizes={"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
               "num_experts": 64, "num_experts_per_tok": 10},
        reduced="64 of 512 experts, as on one of eight GPUs with expert parallelism, and one layer of linear attention"
                " beside one of attention where the whole model has three; the linear attention is transformers' own of"
                " plain torch ops, whose loop over chunks of a text takes eight minutes to compile for 4096 tokens",
    ),
    "gpt_oss": Model(
        "gpt-oss 20B", CAUSAL, "GptOssConfig", 24, vocabulary=201088, attention="eager", batch=8, length=1024,
        types=("sliding_attention", "full_attention"), tiny=TINY | {"num_local_experts": 4},
        sizes={"num_local_experts": 32},
        reduced="attention is transformers' eager form, the only one here that knows sinks, and 8 x 1024 tokens keep"
                " its matrices small",
    ),
    "deepseek_v3": Model(
        "DeepSeek V3", CAUSAL, "DeepseekV3Config", 61, vocabulary=129280, alone=True,
        tiny={"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4,
              "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
              "qk_nope_head_dim": 16, "v_head_dim": 16},
        sizes={"n_routed_experts": 16, "first_k_dense_replace": 0, "num_mtp_layers": 0},
        reduced="16 of 256 experts, as on one of 16 GPUs with expert parallelism",
    ),
    "glm4": Model(
        "GLM-4 9B", CAUSAL, "Glm4Config", 40, vocabulary=151552, tiny=TINY, sizes={"rms_norm_eps": 1e-5}
    ),
    "vit": Model(
        "ViT-L/16", "AutoModelForImageClassification", "ViTConfig", 24, layers=4, batch=128, length=197,
        last_norms=("vit.layernorm",), inputs=images_of, tiny={"hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "image_size": 32},
        sizes={"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "image_size": 224},
    ),
    "whisper": Model(
        "Whisper large v3", "AutoModelForSpeechSeq2Seq", "WhisperConfig", 32, vocabulary=51866, batch=8, length=1500,
        layers_name="encoder_layers", last_norms=("model.encoder.layer_norm", "model.decoder.layer_norm"),
        inputs=speech_of,
        tiny={"d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
              "decoder_ffn_dim": 96, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 16},
        sizes={"d_model": 1280, "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120,
               "decoder_ffn_dim": 5120, "num_mel_bins": 128, "max_source_positions": 1500, "max_target_positions": 448,
               "decoder_layers": 2, "decoder_start_token_id": 3},
    ),
    "mamba2": Model(
        "Mamba2 2.7B", CAUSAL, "Mamba2Config", 64, vocabulary=50288, length=1024, last_norms=("backbone.norm_f",),
        attention="eager", alone=True,
        tiny={"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16},
        sizes={"hidden_size": 2560, "num_heads": 80, "head_dim": 64, "n_groups": 1, "chunk_size": 16},
        reduced=SCAN,
    ),
    "nemotron_h": Model(
        "Nemotron-H 8B", CAUSAL, "NemotronHConfig", 52, vocabulary=131072, layers=4, length=1024,
        types_name="layers_block_type", types=("linear_attention", "mlp", "full_attention", "mlp"),
        last_norms=("model.norm_f",), alone=True,
        tiny=TINY | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
        sizes={"chunk_size": 16},
        reduced=SCAN + "; one layer of attention, one of Mamba and two of MLP where the whole model has 4, 24 and 24",
    ),
    "flux": Model(
        "FLUX.1", "FluxTransformer2DModel", "", 57, layers_name="num_single_layers", last_norms=(), inputs=flux_of,
        tiny={"attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 32, "in_channels": 16,
              "pooled_projection_dim": 32, "axes_dims_rope": (4, 6, 6), "length": 16},
        sizes={"num_layers": 1, "joint_attention_dim": 4096, "in_channels": 64, "pooled_projection_dim": 768},
        reduced="one double and two single blocks where the whole model has 19 and 38; the last norm is kept",
        cudnn_attention=False,  # its backward fails at these shapes in torch 2.11
    ),
    "wan": Model(
        "Wan 2.1 14B", "WanTransformer3DModel", "", 40, layers_name="num_layers", last_norms=("norm_out",),
        inputs=wan_of, batch=1, length=5 * 1560, alone=True,
        tiny={"attention_head_dim": 16, "num_attention_heads": 4, "ffn_dim": 96, "text_dim": 32, "freq_dim": 32,
              "length": 16},
        sizes={"patch_size": (1, 2, 2), "in_channels": 16, "text_dim": 4096},
    ),
}  # fmt: skip
