"""The planner's choices for the problems of tests/versions.py, listed in tests/data/choices.csv.

    python tests/choices.py            lists the choices that differ from the file, and their predicted times
    python tests/choices.py --renew    writes the file anew; say in bench/NOTES.md what was measured

A test fails if a choice that differs is a loss: if it reads its rows more often, leaves them to ATen, or is predicted
to take longer and was not measured.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from versions import some_problems

from fusednorm.planner import limits, table
from fusednorm.planner.choice import Ranges, at, choices, decide
from fusednorm.planner.device import A100, B200, H100, H200, RTX_4090, DeviceSpec
from fusednorm.planner.model import predict_us
from fusednorm.planner.norm_problem import NormProblem
from fusednorm.planner.plan import Plan, ReferencePlan, from_text, num_passes, text_of

LISTED = Path(__file__).parent / "data" / "choices.csv"
DEVICES = {device.name: device for device in (A100, RTX_4090, H100, H200, B200)}
PROBLEMS = [problem for problem in some_problems() if isinstance(problem, NormProblem)]
TOLERANCE = 1.05  # of a predicted time


class Difference(NamedTuple):
    device: str
    problem: str
    rows: int
    then: str
    now: str
    ratio: float  # of the predicted times; infinity for a plan that reads more often, or ATen's; 1 for a measured one

    @property
    def is_loss(self) -> bool:
        return self.ratio > TOLERANCE


def name_of(problem: NormProblem) -> str:
    """The fields that have not their default value."""
    changed = {each.name: getattr(problem, each.name) for each in fields(problem)}
    changed = {name: value for name, value in changed.items() if value != getattr(NormProblem, name, None)}
    changed |= {"form": problem.form.changed} if "form" in changed else {}
    return " ".join(f"{name}={value}" for name, value in changed.items()).replace("torch.", "")


def name_in_list(plan: Plan) -> str:
    return "-" if isinstance(plan, ReferencePlan) else text_of(plan)


def listed(ranges: Ranges) -> str:
    return " ".join(f"{most:g}:{name_in_list(plan)}" for most, plan in ranges)


def from_list(text: str) -> Ranges:
    pairs = (each.split(":") for each in text.split())
    return tuple((float(most), ReferencePlan("") if plan == "-" else from_text(plan)) for most, plan in pairs)


def committed() -> dict[tuple[str, str], Ranges]:
    with LISTED.open() as file:
        return {(row["device"], row["problem"]): from_list(row["plans"]) for row in csv.DictReader(file)}


def differences() -> Iterator[Difference]:
    wanted = committed()
    for name, device in DEVICES.items():
        for problem in PROBLEMS:
            then, now = wanted[name, name_of(problem)], choices(problem, device)
            for rows in [per_sm * device.sm_count for per_sm in limits.compared_rows_per_sm]:
                old, new = at(then, rows), at(now, rows)
                if name_in_list(old) != name_in_list(new):
                    plans, ratio = (name_in_list(old), name_in_list(new)), _ratio(old, new, problem, rows, device)
                    yield Difference(name, name_of(problem), rows, *plans, ratio)


def _ratio(old: Plan, new: Plan, problem: NormProblem, rows: int, device: DeviceSpec) -> float:
    if isinstance(old, ReferencePlan) or isinstance(new, ReferencePlan):
        return math.inf if isinstance(new, ReferencePlan) else 0.0
    if num_passes(new, problem) > num_passes(old, problem):
        return math.inf
    if decide(problem, device).source not in ("model", "published"):
        return 1.0
    coefficients = table.coefficients(device)
    return predict_us(new, problem, rows, device, coefficients) / predict_us(old, problem, rows, device, coefficients)


def renew() -> None:
    with LISTED.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["device", "problem", "plans"])
        for name, device in DEVICES.items():
            writer.writerows([name, name_of(problem), listed(choices(problem, device))] for problem in PROBLEMS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--renew", action="store_true", help="write the choices of now")
    if parser.parse_args().renew:
        renew()
        return 0
    found = list(differences())
    for each in found:
        where = f"{each.device}, {each.problem}, {each.rows} rows"
        print(f"{where}: {each.then} -> {each.now}, {each.ratio:.2f} of the time")
    print(f"{len(found)} choices differ, of which {sum(each.is_loss for each in found)} are losses")
    return len(found) > 0


if __name__ == "__main__":
    raise SystemExit(main())
