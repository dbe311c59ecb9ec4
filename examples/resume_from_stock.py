"""What this shows: a checkpoint of a model on stock norms, with the optimizer's state, loads into a model on our norms,
and the training continues as if nothing had changed; then the same in the other direction.

    python -m examples.resume_from_stock --steps 40

Half of the steps come before the checkpoint. State dicts have the same names and tensors, so nothing has to be
converted. The last line compares with a training on stock norms without a checkpoint. On a CPU our functionals call
ATen, and the losses agree to the last bit; on a GPU they differ by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from .language_models import MODELS, OURS, STOCK, LanguageModel, Norms, batches, help_text
from .training import arguments, draw, make_optimizer, only_process, train


def save(model: nn.Module, optimizer: Optimizer, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def load(model: nn.Module, optimizer: Optimizer, path: Path) -> None:
    checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])


def main(given: Sequence[str] | None = None) -> None:
    asked = arguments("resume_from_stock", __doc__, given, (*MODELS,))
    device, size = only_process()
    half, path = asked.steps // 2, asked.out / "checkpoint.pt"

    def start(norms: Norms) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = LanguageModel(asked.model, size, norms).to(device)
        return model, make_optimizer(model)

    def without_a_break(norms: Norms) -> list[float]:
        return train(start(norms)[0], batches(help_text(), size), asked.steps).losses

    def with_a_checkpoint(before: Norms, after: Norms) -> list[float]:
        feed = batches(help_text(), size)
        model, optimizer = start(before)
        losses = train(model, feed, half, optimizer).losses
        save(model, optimizer, path)
        model, optimizer = start(after)
        load(model, optimizer, path)
        return losses + train(model, feed, asked.steps - half, optimizer).losses

    runs = {
        "stock, no break": without_a_break(STOCK),
        "stock, then ours": with_a_checkpoint(STOCK, OURS),
        "ours, then stock": with_a_checkpoint(OURS, STOCK),
    }
    for label, losses in runs.items():
        print(f"{label}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    apart = max(abs(a - b) for losses in runs.values() for a, b in zip(runs["stock, no break"], losses, strict=True))
    print(f"The losses are never more than {apart:.2g} apart. The last checkpoint: {path}")
    draw(runs, asked.out / f"resume_from_stock_{asked.model}.png", f"A checkpoint after step {half}")


if __name__ == "__main__":
    main()
