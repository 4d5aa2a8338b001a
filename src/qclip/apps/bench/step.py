"""A step: what is timed, and what private ones have in common."""

from collections.abc import Callable

Step = Callable[[], None]
CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0
