"""All mutants, by what they break."""

from typing import Final

from mutants import accounts, gradients, holes, many, steps
from mutants.mutant import Mutant

MUTANTS: Final[dict[str, tuple[Mutant, ...]]] = {
    "Accounts and sampling": accounts.MUTANTS,
    "The step": steps.MUTANTS,
    "Clipping and proofs": gradients.MUTANTS,
    "Processes and clients": many.MUTANTS,
    "Holes that were found by attack": holes.MUTANTS,
}
