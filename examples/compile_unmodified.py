"""What this shows: one line, `fusednorm.enable_inductor()`, makes the graphs of a compiled model that does not use
this package call our kernels. Prints which norms became ours, tokens/s and memory, and draws loss curves.

    python -m examples.compile_unmodified --model gpt2

Forwards stay with Inductor where it fuses norms with their neighbours, and in rows of at most 1024 columns. The report
lists the norms that this process traced; a second run takes its graphs from the compile cache and lists none. On a CPU
every norm stays with Inductor, which then compiles C++: that needs a compiler and half a minute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

import fusednorm
from fusednorm.integrations import inductor

from .language_models import MODELS, STOCK, LanguageModel, batches, help_text
from .training import arguments, only_process, report, train


def main(given: Sequence[str] | None = None) -> None:
    asked = arguments("compile_unmodified", __doc__, given, (*MODELS,))
    device, size = only_process()
    runs = {}
    for label, around in (("inductor", contextlib.nullcontext), ("fusednorm", fusednorm.enable_inductor)):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = LanguageModel(asked.model, size, STOCK).to(device)
        with around():
            runs[label] = train(torch.compile(model), batches(help_text(), size), asked.steps)
    print(inductor.report())
    report(runs, size.tokens, asked.out / f"compile_unmodified_{asked.model}.png")


if __name__ == "__main__":
    main()
