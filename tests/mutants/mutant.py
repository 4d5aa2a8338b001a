"""A mutant: a fault as an edit of the sources, and the tests that must notice it."""

import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Edit:
    """Replaces a text, which must be there exactly once, in a file below ``src/qclip``."""

    file: str
    old: str
    new: str

    def applied(self, package: Path) -> str:
        """Return the text of the file with the fault."""
        text = (package / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has this text {text.count(self.old)} times, not once:\n{self.old}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Mutant:
    """A fault."""

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...] = ()
    """Tests of the fast suite below ``tests``; at least one must fail."""
    replay: str = ""
    """The training of `audit.holes` in which `qclip.audit.replay` must find something."""
    audit: str = ""
    """The attack of `audit.holes` that must exceed the claim."""

    def plant(self, package: Path) -> None:
        """Apply the edits to a copy of ``src/qclip``, one after the other."""
        for edit in self.edits:
            text = edit.applied(package)
            (package / edit.file).write_text(text, encoding="utf-8")


def copied(folder: Path) -> Path:
    """Copy the sources to a folder; return the package there."""
    package = folder / "src" / "qclip"
    shutil.copytree(ROOT / "src" / "qclip", package, ignore=shutil.ignore_patterns("__pycache__"))
    return package
