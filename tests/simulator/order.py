"""What goes on next. Whatever can (a warp, a copy under way) has a priority; the highest goes on, and now and then,
as the seed has it, one is given another. So a seed may let one warp run as far as it goes, or all take turns; hold
copies back until nobody else can go on, or land them at once; prefer one CTA to the others."""

from __future__ import annotations

import heapq
import itertools
import random

from .races import SimulationError

MAX_STEPS = 20_000_000
PATIENCE = 500  # steps after which who goes on gets another priority, for the sake of those that it waits for


class Deadlock(SimulationError):
    """Nobody can go on."""


class Order:
    """Of what has a `priority` and a `step()` that goes on a little and says whether it still can."""

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
        """Until nobody can go on."""
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
