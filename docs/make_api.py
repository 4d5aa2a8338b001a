"""Write docs/api.md from the public names of qclip and their docstrings: `make api`.

A public name is one in ``qclip.__all__`` or in the ``__all__`` of a public module. A module without ``__all__`` has
the public names that it defines.
"""

import inspect
import runpy
import textwrap
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import qclip

DOCS = Path(__file__).parent
PAGE = DOCS / "api.md"
HEAD = """# API

The public names, each with its signature and the first paragraph of its docstring. `make api` writes this page.
"""
OPTIONAL = (
    "integrations.distributed", "integrations.transformers", "integrations.release_log", "integrations.tensorboard",
    "integrations.wandb", "integrations.mlflow", "integrations.csv",
)  # fmt: skip
"""Public modules for optional packages, which `qclip.__all__` leaves out. Flower is not installed where this runs."""

wrap = runpy.run_path(str(DOCS / "wrap.py"))


def page() -> str:
    """Return the whole page."""
    modules = {name: found for name in qclip.__all__ if inspect.ismodule(found := getattr(qclip, name))}
    modules |= {name: import_module(f"qclip.{name}") for name in OPTIONAL}
    elsewhere = {id(value) for module in modules.values() for _, value in public(module)}
    own = [(name, value) for name, value in public(qclip) if name not in modules and id(value) not in elsewhere]
    sections = [_section("qclip", "Private training of PyTorch models.", own)]
    for name, module in modules.items():
        sections.append(_section(f"qclip.{name}", paragraph(module), list(public(module))))
    titles = ["qclip", *(f"qclip.{name}" for name in modules)]
    contents = "\n".join(f"- [{title}](#{title.replace('.', '')})" for title in titles)
    return wrap["wrapped"]("\n".join([f"{HEAD}\n{contents}\n", *sections]))


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the public names of a module with their values."""
    for name in getattr(module, "__all__", None) or sorted(vars(module)):
        value = getattr(module, name)
        if hasattr(module, "__all__") or (
            not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ):
            yield name, value


def paragraph(value: Any) -> str:
    """Return the first paragraph of a docstring, as Markdown."""
    text = (inspect.getdoc(value) or "").split("\n\n")[0]
    return " ".join(text.split()).replace("``", "`")


def _section(title: str, about: str, names: list[tuple[str, Any]]) -> str:
    return "\n".join([f"## {title}\n\n{about}\n", *(_entry(title, name, value) for name, value in names)])


def _entry(module: str, name: str, value: Any) -> str:
    full = f"qclip.{name}" if name in qclip.__all__ else f"{module}.{name}"
    if inspect.ismodule(value):
        lines = [_code(found_name, found) for found_name, found in public(value)]
        return f"### {full}\n\n{paragraph(value)}\n\n" + "\n".join(lines)
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return f"### {full}\n\n{_code(name, value)}"
    return f"### {full}\n\n{_code(name, value)}\n{paragraph(value)}\n{_members(value)}"


def _members(value: Any) -> str:
    lines = []
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        is_property = isinstance(member, property | cached_property)
        is_method = inspect.isfunction(member) or isinstance(member, classmethod | staticmethod)
        if name.startswith("_") or not (is_property or is_method):
            continue
        call = name if is_property else name + signature(getattr(value, name))
        if about := paragraph(getattr(value, name)):
            lines.append(f"- `{call}`: {about}")
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def _code(name: str, value: Any) -> str:
    if inspect.isclass(value) and issubclass(value, Exception):
        text = f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
    elif inspect.isclass(value) or inspect.isroutine(value):
        text = name + signature(value)
    else:
        text = f"{name} = {value!r}"
    lines = textwrap.wrap(text, wrap["WIDTH"], subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "```text\n" + "\n".join(lines) + "\n```\n"


def signature(value: Any) -> str:
    """Return the parameters of a function or class with their defaults, without types and without ``self``."""
    try:
        full = inspect.signature(value)
    except ValueError:
        return "(...)"
    parameters = [
        each.replace(
            annotation=each.empty, default=_Shown(each.default) if each.default is not each.empty else each.empty
        )
        for each in full.parameters.values()
        if each.name not in ("self", "cls")
    ]
    return str(inspect.Signature(parameters))


class _Shown:
    """A default value, printed the same on every machine and in every version of Python."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return getattr(self.value, "__name__", None) or repr(self.value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
