"""Noise source: the random numbers behind all noise of a run, from a secret key and a count of what was drawn."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Stream = Callable[[int], np.random.Generator]
"""From the number of a part to that part's own random numbers."""


class NoiseSource:
    """Random numbers from a key of 128 bits, which are the operating system's unless there is a seed.

    Each draw takes counters of Philox (4 x 64 bits) that no other draw uses, so no two share random numbers, and where
    a draw begins does not depend on how much the last one used. Not cryptographic: nobody has promised that outputs of
    Philox do not tell its key.
    """

    def __init__(self, seed: int | np.random.SeedSequence | None = None) -> None:
        sequence = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
        low, high = sequence.generate_state(2, np.uint64).tolist()
        self._key: int = low | high << 64
        self._draws = 0

    def streams(self) -> Stream:
        """A new draw, in as many parts as are asked for, each independent of the others."""
        key, counter = self._key, self._begin(0)
        return lambda part: np.random.Generator(np.random.Philox(key=key, counter=counter | part << 64))

    def words(self) -> tuple[int, int]:
        """A new draw: two secret words of 64 bits, for a kernel that makes its own random numbers of them."""
        low, high = np.random.Philox(key=self._key, counter=self._begin(1)).random_raw(2).tolist()
        return low, high

    def state_dict(self) -> dict[str, int]:
        """All there is to know, as plain data: a secret."""
        return {"key": self._key, "draws": self._draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""
        self._key, self._draws = state["key"], state["draws"]

    def _begin(self, purpose: int) -> int:
        """Where the next draw's counters begin, of 256 bits: purpose, draw, part, and what Philox counts itself.

        The purpose is in it because a run may go on by another way than it was saved, and words that were used as
        normal numbers once must not become a kernel's secret.
        """
        counter = purpose << 192 | self._draws << 128
        self._draws += 1
        return counter
