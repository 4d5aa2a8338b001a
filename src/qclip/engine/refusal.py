"""The one error of the engine."""


class Refusal(ValueError):
    """The engine cannot do this exactly, so it does not do it. The message names what and says what to do instead."""
