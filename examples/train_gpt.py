"""What this shows: a small GPT learns the text of Python's own help, once on stock norms and once on ours. Prints
tokens/s and memory, and draws loss curves.

    python -m examples.train_gpt --model gpt2       LayerNorm; --model llama: RMSNorm

The models differ only in the classes of their norms (language_models.py, `Norms`). Both start from the same parameters
and read the same passages. On a CPU our functionals call ATen, so both kinds of norms run the same code, and the curves
coincide.
"""

from __future__ import annotations

from collections.abc import Sequence

from .language_models import MODELS
from .training import arguments, only_process, train_each


def main(given: Sequence[str] | None = None) -> None:
    asked = arguments("train_gpt", __doc__, given, (*MODELS,), norms=True)
    train_each(asked, *only_process())


if __name__ == "__main__":
    main()
