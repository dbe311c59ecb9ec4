"""python -m fusednorm demo: checks the ops on real activations against float64, then trains a small GPT with stock
norms and with ours."""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from .. import __version__
from ..host import fallback
from ..host.kernel_devices import kernels_on
from .console import optional, print_table, progress, show_beside
from .interpreter import enable_interpreter
from .oracle import Case, Inputs, Outputs, assert_outputs_close, exact, fused, make_inputs, relative_error, stock

SEED = 0
TEXT_BYTES = 4 << 20
PATIENCE_SECONDS = 120  # training stops after this time, even on a slow machine
SAME_LOSS = 0.02  # relative difference allowed between the final losses, which differ only by rounding
SMALL_PROBLEMS = (
    Case("layer", (24, 160), x_dtype=torch.bfloat16, weight_dtype=torch.bfloat16, bias_dtype=torch.bfloat16),
    Case("rms", (24, 160), x_dtype=torch.bfloat16, weight_dtype=torch.bfloat16),
)
Checked = dict[str, dict[str, str]]  # errors as text, by problem and output


@dataclass(frozen=True)
class Size:
    """The sizes of the model and of its training."""

    width: int
    blocks: int
    heads: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    dtype: torch.dtype


CPU_SIZE = Size(128, 4, 4, 128, 16, 150, 2e-3, torch.float32)
GPU_SIZE = Size(1024, 12, 16, 1024, 16, 300, 3e-4, torch.bfloat16)  # takes about 20 GB
SMALL_GPU_SIZE = replace(GPU_SIZE, batch=4)


def run(options: argparse.Namespace) -> int:
    """Run the demo. Returns 0 if every output was within its bounds and both trainings ended at the same loss, else
    1."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = pick_size(device)
    steps = options.steps or size.steps
    print(describe(device))
    text = standard_library_text()
    torch.manual_seed(SEED)
    model = GPT(size).to(device, size.dtype)
    right = check_activations(model, next(batches(text, size, device)))
    if device.type == "cpu" and has_interpreter():
        right &= check_interpreted()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"\nA byte-level GPT of {parameters / 1e6:.1f} M parameters reads the source of Python's standard library.")
    right &= report(train(model, text, size, steps), options.out)
    print(conclusion(device, right))
    return 0 if right else 1


def conclusion(device: torch.device, right: bool) -> str:
    """What the demo has shown on this device, and what it has not."""
    if not right:
        return "\nSomething above is WRONG."
    if device.type == "cuda":
        return """
Shown: the GPU's kernels compute what float64 does, within rounding; a model trains on them as on stock norms."""
    interpreted = "the interpreter ran the portable ones" if has_interpreter() else "the portable ones did not run"
    return f"""
Shown on this CPU: the ops compute what float64 does, within rounding. Ops and models ran ATen's kernels here, as CPU
tensors do. Of the GPU's kernels {interpreted}.
Those with TMA run on a simulated GPU in a clone of the repository: python -m tests.simulator.demo
Not shown: how fast anything is, and that a GPU does what interpreter and simulator do."""


def has_interpreter() -> bool:
    """Whether Triton's interpreter can run: it needs numpy, which neither torch nor Triton brings."""
    return optional("numpy", "demo", "the portable Triton kernels are not interpreted") is not None


def pick_size(device: torch.device) -> Size:
    if device.type != "cuda":
        return CPU_SIZE
    return GPU_SIZE if torch.cuda.get_device_properties(device).total_memory > 32 << 30 else SMALL_GPU_SIZE


def describe(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"fusednorm {__version__}, torch {torch.__version__}, Python {platform.python_version()}, on {name}"


# The model


def block(size: Size) -> nn.TransformerEncoderLayer:
    """A pre-norm transformer block: a LayerNorm before the attention, an RMSNorm before the MLP."""
    made = nn.TransformerEncoderLayer(
        size.width, size.heads, 4 * size.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    made.norm2 = nn.RMSNorm(size.width)
    return made


class GPT(nn.Module):
    """A byte-level GPT: maps bytes to logits of the next byte."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(256, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(block(size) for _ in range(size.blocks))
        self.final_norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], x.device, x.dtype)
        for each in self.blocks:
            x = each(x, mask, is_causal=True)
        return self.head(self.final_norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def standard_library_text() -> Tensor:
    """The first TEXT_BYTES bytes of the standard library's modules, in order of their names."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    if not text:
        raise RuntimeError("demo: needs the source of Python's standard library, got a Python without it")
    return torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8)


def batches(text: Tensor, size: Size, device: torch.device) -> Iterator[Tensor]:
    """Batches of random windows of context + 1 bytes. Every call yields the same sequence."""
    generator = torch.Generator().manual_seed(SEED)
    offsets = torch.arange(size.context + 1)
    while True:
        starts = torch.randint(len(text) - size.context, (size.batch, 1), generator=generator)
        yield text[starts + offsets].to(device, torch.long)


# The ops against float64


def check_activations(model: GPT, tokens: Tensor) -> bool:
    """Run one forward and backward of the model, then check the ops on the inputs and gradients of some of its norms.
    True if all outputs are within their bounds."""
    first, last = model.blocks[0], model.blocks[-1]
    norms = {
        "first attention": first.norm1,
        "first MLP": first.norm2,
        "last attention": last.norm1,
        "last MLP": last.norm2,
        "final": model.final_norm,
    }
    seen: dict[str, list[Tensor]] = {label: [] for label in norms}

    def record(label: str):
        def hook(norm: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            seen[label].append(inputs[0].detach())
            output.register_hook(seen[label].append)

        return hook

    hooks = [norm.register_forward_hook(record(label)) for label, norm in norms.items()]
    model.loss(tokens).backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    checked = {}
    for label, norm in norms.items():
        x, grad_out = seen.pop(label)
        bias = getattr(norm, "bias", None)
        kind = "layer" if bias is not None else "rms"
        case = Case(kind, tuple(x.shape), 1, x.dtype, x.dtype, None if bias is None else x.dtype, eps=norm.eps)
        inputs = Inputs(x, grad_out, norm.weight.detach(), None if bias is None else bias.detach())
        checked[f"{label} ({kind})"] = compare(fused(case, inputs), case, inputs)
    what = f"{tuple(x.shape)} in {str(x.dtype).removeprefix('torch.')}"
    return print_errors(f"The ops on the untrained model's activations, {what}", checked)


def check_interpreted() -> bool:
    """Check SMALL_PROBLEMS by the portable kernels in Triton's interpreter."""
    title, before = "The portable Triton kernels in Triton's interpreter", len(fallback.failures())
    try:
        enable_interpreter()
        with kernels_on("cpu"):
            checked = {str(case): check_ops(case) for case in SMALL_PROBLEMS}
        for failure in fallback.failures()[before:]:
            raise RuntimeError(str(failure))
    except Exception as error:
        print(f"\nWRONG: {title}: {type(error).__name__}: {error}")
        return False
    return print_errors(title, checked)


def check_ops(case: Case) -> dict[str, str]:
    """`compare` of the ops on random inputs."""
    inputs = make_inputs(case)
    return compare(fused(case, inputs), case, inputs)


def compare(got: Outputs, case: Case, inputs: Inputs) -> dict[str, str]:
    """Per output, our relative error and ATen's, as text. The key "wrong" has the bound that does not hold, if any."""
    want, aten = exact(case, inputs), stock(case, inputs)
    errors = {}
    for name in (f.name for f in fields(Outputs) if getattr(got, f.name) is not None):
        ours, theirs = (relative_error(getattr(o, name), getattr(want, name)) for o in (got, aten))
        errors[name] = f"{ours:.1e} / {theirs:.1e}"
    try:
        assert_outputs_close(got, case, inputs)
    except AssertionError as failure:
        errors["wrong"] = str(failure)
    return errors


def print_errors(title: str, checked: Checked) -> bool:
    names = ("y", "dx", "dweight", "dbias")
    rows = [[label, *(errors.get(name, "") for name in names)] for label, errors in checked.items()]
    print_table(f"{title}:\nrelative error against float64 autograd, ours / ATen's", ["norm", *names], rows)
    wrong = [errors["wrong"] for errors in checked.values() if "wrong" in errors]
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    if not wrong:
        print("Right: every output is within its bounds (fusednorm/tools/oracle.py).")
    return not wrong


# Training


class Training:
    """Training by AdamW on float32 copies of the parameters: AdamW's small steps would not change a 16-bit norm weight
    near 1."""

    def __init__(self, model: GPT, size: Size, steps: int) -> None:
        self.model = model
        self.losses: list[float] = []
        self.seconds: list[float] = []  # per step
        self._parameters = list(model.parameters())
        self._masters = [p.detach().float().clone() for p in self._parameters]
        self._optimizer = torch.optim.AdamW(self._masters, lr=size.learning_rate, betas=(0.9, 0.95))
        self._warmup = LinearLR(self._optimizer, start_factor=0.05, total_iters=max(1, steps // 10))

    def step(self, tokens: Tensor) -> None:
        start = time.perf_counter()
        loss = self.model.loss(tokens)
        loss.backward()
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        self._warmup.step()
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._masters)
        self.losses.append(loss.item())  # item() waits for the device, so the time below is complete
        self.seconds.append(time.perf_counter() - start)


def train(model: GPT, text: Tensor, size: Size, steps: int) -> dict[str, Training]:
    """Train the model and a copy of it with our norms. Their steps alternate, so that other load slows both alike."""
    from .. import patch_model  # imported late, as it may not know this torch

    device = next(model.parameters()).device
    models = {"stock norms": model, "fusednorm": copy.deepcopy(model)}
    patch_model(models["fusednorm"])
    runs = {label: Training(model, size, steps) for label, model in models.items()}
    began = time.perf_counter()
    bar = progress(range(steps), "training both", "demo")
    for step, tokens in zip(bar, batches(text, size, device), strict=False):
        if step and time.perf_counter() - began > PATIENCE_SECONDS:
            print(f"\nTraining stopped after {step} of {steps} steps: {PATIENCE_SECONDS} seconds are over.")
            break
        for run in runs.values():
            run.step(tokens)
        show_beside(bar, ", ".join(f"{run.losses[-1]:.3f}" for run in runs.values()))
    return runs


def report(runs: dict[str, Training], out: Path) -> bool:
    """Print the table of step times and draw the losses. True if the final losses are within SAME_LOSS."""
    last = {label: statistics.mean(run.losses[-10:]) for label, run in runs.items()}
    milliseconds = {label: 1e3 * statistics.median(run.seconds) for label, run in runs.items()}
    rows = [[k, f"{milliseconds[k]:.1f}", f"{run.losses[0]:.4f}", f"{last[k]:.4f}"] for k, run in runs.items()]
    print_table("Training", ["norms", "ms per step (median)", "first loss", "last loss (mean of 10)"], rows)
    stock_run, our_run = runs.values()
    difference = max(abs(a - b) for a, b in zip(stock_run.losses, our_run.losses, strict=True))
    print(f"The two losses are never more than {difference:.2g} apart.")
    if optional("matplotlib", "demo", "there is no picture of the losses"):
        print(f"Loss curves: {draw_losses(runs, out)}")
    ends = list(last.values())
    if not abs(ends[0] - ends[1]) <= SAME_LOSS * ends[0]:  # `not <=` rather than `>`, so that nan fails
        print(f"WRONG: both runs must end at the same loss, got {ends[0]:.4f} and {ends[1]:.4f}")
        return False
    return True


def draw_losses(runs: dict[str, Training], out: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (label, run), style in zip(runs.items(), ("-", "--"), strict=True):
        axes.plot(run.losses, style, label=label, linewidth=2 if style == "-" else 1.2)
    axes.set(xlabel="step", ylabel="cross entropy (nats per byte)", title="One GPT, one seed, two sets of norms")
    axes.legend()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "demo_loss.png"
    figure.savefig(path, dpi=150)
    return path
