"""python -m fusednorm build | demo | doctor | plan | tune | hub"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from . import __version__
from .tools.plan import add_plan_arguments, positive
from .tools.tune import add_tune_arguments


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fusednorm")
    parser.add_argument("--version", action="version", version=f"fusednorm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="build | demo | doctor | plan | tune | hub")
    commands.add_parser("build", help="compile the host side in C++ for the installed torch: once, a minute")
    demo = commands.add_parser("demo", help="check the ops on real activations, then train a small GPT on them")
    demo.add_argument("--steps", type=positive, help="training steps of each of the two runs (default: by device)")
    demo.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture (default: out)")
    commands.add_parser("doctor", help="say what this machine has, what works on it and what falls back")
    plan = commands.add_parser("plan", help="say which kernels run for a shape on a GPU, and why")
    add_plan_arguments(plan)
    plan.add_argument("--json", action="store_true", help="a line of JSON for each case")
    add_tune_arguments(commands.add_parser("tune", help="time plans on this GPU, and plan by the fastest from then on"))
    hub = commands.add_parser("hub", help="write a repository that Hugging Face's `kernels` loads")
    hub.add_argument("folder", type=Path, help="a new folder for it, or one that an earlier call wrote")
    options = parser.parse_args(arguments)
    try:
        return importlib.import_module(f".tools.{options.command}", __package__).run(options)
    except OSError as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
