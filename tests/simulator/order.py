"""Chooses what runs next: of the warps and copies that can run, the one with the highest priority.

The seed draws the priorities, and how often a priority changes. One seed lets a warp run as far as it can, another lets
all take turns. One holds copies back until nothing else can run, another lands them at once. Some prefer one CTA.
"""

from __future__ import annotations

import heapq
import itertools
import random

from .races import SimulationError

MAX_STEPS = 20_000_000
PATIENCE = 500  # after so many steps in a row a warp gets another priority: it may spin on a value from another warp


class Deadlock(SimulationError):
    """Nothing can run, or no end is in sight."""


class Order:
    """Runs objects (warps, copies) with a `priority` and a `step()`, which runs a little and returns whether it can run
    on at once."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.shuffle = self.random.choice((0.0, 0.0, 0.01, 0.1, 1.0))  # how often a priority changes
        self.by_cta = self.random.choice((False, False, True))
        self.copies = self.random.choice((-1.0, 0.0, 0.0, 1.0))  # late, at some time, at once
        self.steps = 0
        self._ready: list[tuple] = []  # priority, turn, who
        self._ties = itertools.count()

    def draw(self, of_cta: float = 0.0) -> float:
        return of_cta + self.random.random() * (0.1 if self.by_cta else 1.0)

    def draw_cta(self) -> float:
        return self.random.random() if self.by_cta else 0.0

    def draw_copy(self) -> float:
        return self.random.random() + 2 * self.copies

    def add(self, who) -> None:
        heapq.heappush(self._ready, (-who.priority, next(self._ties), who))

    def run(self) -> None:
        """Runs until nothing can run."""
        ready, patience = self._ready, PATIENCE
        while ready:
            who = heapq.heappop(ready)[2]
            self.steps += 1
            if not who.step():
                patience = PATIENCE
                continue
            patience -= 1
            if not patience or (self.shuffle and self.random.random() < self.shuffle):
                who.priority, patience = self.random.random(), PATIENCE
            self.add(who)
            if self.steps > MAX_STEPS:
                raise Deadlock(f"no end after {MAX_STEPS} steps")
