"""Hooks of mkdocs.yml: the API reference from signatures and docstrings, README as home, links that work on GitHub and in the site.

mkdocstrings reads source texts, but calcvm makes some functions when it is imported.  So it reads modules that `write` makes:
the public names as they are, with their docstrings as Markdown.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import GenericAlias
from typing import Any

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/calcvm/calcvm"
HOME = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}  # pages outside docs/
MODULES = ("calcvm", *(f"calcvm.{name}" for name in ("nn", "init", "zoo", "data", "operators", "sklearn")))
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK_OR_CODE = r"^#.*$|(?P<before>\[[^\]]*\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)]*)?\)|(?P<name>`(?:cv|nn|calcvm)\.[\w.]+`)|`[^`]+`"
SECTION = re.compile(r"\n+(?=[A-Z]\w+\n---+\n)")  # of a docstring
PARSED = ("Parameters", "Returns", "Raises", "Attributes")  # sections of items
STUBS = ROOT / "build" / "reference"


# ---------------------------------------------------------------- what is public
@cache
def public() -> dict[str, Any]:
    """Every public object by its full name, each once."""
    found: dict[str, Any] = {}
    for name in MODULES:
        module = import_module(name)
        for key in getattr(module, "_public", module.__all__):
            value = getattr(module, key)
            known = (inspect.unwrap(other) for other in found.values())
            if not inspect.ismodule(value) and not any(inspect.unwrap(value) is other for other in known):
                found[f"{name}.{key}"] = value
    return found


def described(value: Any) -> str:
    """The docstring of an object, or of its call if its class is not public."""
    is_instance = callable(value) and not hasattr(value, "__name__")
    return inspect.getdoc(value.__call__ if is_instance else value) or ""


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Documented methods and properties, down to those of a public base class, which that has."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if base is not cls and base in public().values() or not base.__module__.startswith("calcvm"):
            return
        for name, member in vars(base).items():
            function = getattr(member, "fget", None) or getattr(member, "func", member)
            function = member.__func__ if isinstance(member, classmethod) else function
            if name[0] != "_" and name not in seen and inspect.isfunction(function) and function.__doc__:
                seen.add(name)
                yield name, member


@cache
def linked() -> set[str]:
    """Full names that links may lead to."""
    classes = [(name, value) for name, value in public().items() if isinstance(value, type)]
    return {*public(), *(f"{name}.{member}" for name, cls in classes for member, _ in members(cls))}


# ---------------------------------------------------------------- signatures and docstrings
class Bare(str):
    """A text that signatures show without quotes."""

    __repr__ = str.__str__


def signature(function: Any) -> str:
    """The parameters and the result of a function, as source."""
    found = inspect.signature(function)
    plain = [Bare(a) if isinstance(a, str) else a for a in (p.annotation for p in found.parameters.values())]
    given = [p.replace(annotation=a) for p, a in zip(found.parameters.values(), plain)]
    given = [
        p.replace(default=Bare("...")) if "<" in repr(p.default) and p.default is not p.empty else p for p in given
    ]
    result = found.return_annotation
    return str(found.replace(parameters=given, return_annotation=Bare(result) if isinstance(result, str) else result))


def source(full: str, value: Any) -> str:
    """An object as source without its code: signature, docstring, and the members of a class."""
    owner, _, name = full.rpartition(".")
    doc = f"\n{markdown(described(value), full)!r}\n"
    if isinstance(value, type):
        bases = [base.__name__ for base in value.__mro__[1:] if base in public().values()][:1]
        init = f"def __init__{signature(value.__init__)}: ...\n" if inspect.isfunction(value.__init__) else ""
        inner = "".join(source(f"{full}.{member}", of) for member, of in members(value))
        return f"class {name}({', '.join(bases)}):" + (doc + init + inner).replace("\n", "\n    ") + "\n"
    function = getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", value)
    if not callable(function) or isinstance(function, GenericAlias):
        return f"{name} = {value!r}\n"
    kind = "@classmethod\n" if isinstance(value, classmethod) else "" if function is value else "@property\n"
    return f"{kind}def {name}{signature(function)}:" + doc.replace("\n", "\n    ") + "\n"


def markdown(doc: str, full: str) -> str:
    """A docstring as Markdown: plain characters escaped, names linked, and the text of ``name : text`` below the name."""
    text, *sections = SECTION.split(doc)
    parts = [re.sub(r"(?:\n|  )(\w+(?:, \w+)*) : ", r"\n\n**\1**: ", plain(text, full))]
    for section in sections:
        title, _, body = section.split("\n", 2)
        if title in PARSED:
            body = re.sub(
                r"^(\S.*?) : (.*)((?:\n    .*)*)", lambda m: item(*m.groups(), full), body, flags=re.MULTILINE
            )
            section = f"{title}\n---\n{body}"
        parts.append(section if title in (*PARSED, "Examples") else f"**{title}**\n\n{plain(body, full)}")
    return "\n\n".join(parts)


def item(names: str, kind: str, rest: str, full: str) -> str:
    """An item of a section once for each of its names; its types have their own sentence if the text begins another."""
    text = plain(f"{kind}.{rest}" if re.match(r'\n    ["A-Z]', rest) else f"{kind}{rest}", full)
    return "\n".join(f"{name}\n    {text}" for name in names.split(", "))


def plain(text: str, full: str) -> str:
    """Text with backslashes before what Markdown would read, and links to public names in backticks."""

    def change(m: re.Match[str]) -> str:
        return link(m[0], full) if m[0].startswith("`") else f"\\{m[0]}"

    return re.sub(r"`+[^`]*`+|[*<\[]", change, text)


def link(code: str, full: str) -> str:
    """A name in backticks, with a link to where the reference has it, seen from an object."""
    name = re.sub(r"^(cv|calcvm)\.", "", code.strip("`"))
    scopes = ("calcvm", full, full.rpartition(".")[0], "calcvm.init")
    found = [f"{scope}.{name}" for scope in scopes if f"{scope}.{name}" in linked()]
    return f"[{code}][{found[0]}]" if found else code


# ---------------------------------------------------------------- hooks of mkdocs
def on_config(config: Any) -> None:
    """Write the modules that mkdocstrings reads."""
    for module in MODULES:
        path = STUBS.joinpath(*module.split("."), "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        objects = [(full, value) for full, value in public().items() if full.rpartition(".")[0] == module]
        path.write_text("from __future__ import annotations\n" + "\n".join(source(*of) for of in objects))


def on_files(files: Any, config: Any) -> None:
    from mkdocs.structure.files import File

    for name, page in HOME.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site has them, and links from names in backticks to the reference; code stays as it is."""
    at = page.file.src_uri
    pages = {page: name for name, page in HOME.items()}
    parts = FENCE.split(markdown)
    parts[::2] = [re.sub(LINK_OR_CODE, lambda m: seen(m, at, pages.get(at, f"docs/{at}")), part) for part in parts[::2]]
    return "".join(parts)


def seen(m: re.Match[str], at: str, here: str) -> str:
    """A link or a name in backticks of page ``at``, which is the file ``here`` of the repository."""
    if not m["target"]:
        return link(m[0], "") if m["name"] else m[0]
    target = re.sub(rf"^{REPOSITORY}/(blob|raw)/main/", "/", m["target"])
    if ":" in target:
        return m[0]
    path = posixpath.normpath(posixpath.join("/", posixpath.dirname(here), target))[1:]
    page = HOME.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
    url = posixpath.relpath(page, posixpath.dirname(at) or ".") if page else f"{REPOSITORY}/blob/main/{path}"
    return f"{m['before']}{url}{m['anchor'] or ''})"
