"""What this shows: a small GPT learns the text of Python's own help, once on stock norms and once on ours; tokens/s,
memory and loss curves of each.

    python -m examples.train_gpt --model gpt2       LayerNorm; --model llama: RMSNorm

The models differ in the classes of their norms alone (language_models.py, `Norms`); both start from the same parameters
and read the same passages. On a CPU our functionals hand tensors to ATen, so that both kinds of norms run the same code
and the curves are one.
"""

from __future__ import annotations

from collections.abc import Sequence

from .training import arguments, only_process, train_each


def main(given: Sequence[str] | None = None) -> None:
    asked = arguments("train_gpt", __doc__, given)
    train_each(asked, *only_process())


if __name__ == "__main__":
    main()
