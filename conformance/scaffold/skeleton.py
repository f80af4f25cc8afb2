"""The skeleton of a vendor's package: ``fx-quant-conformance init`` (docs/vendor-guide.md)."""

from __future__ import annotations

import keyword
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from fx_quant_conformance.backends.names import SHIPPED

FILES = {
    "pyproject.toml": "pyproject.toml.j2",
    "README.md": "README.md.j2",
    ".gitignore": "gitignore.j2",
    ".github/workflows/conformance.yml": "workflow.yml.j2",
    "{name}/__init__.py": "init.py.j2",
    "{name}/backend.py": "backend.py.j2",
    "{name}/waivers.toml": "waivers.toml.j2",
}
"""The files of the package, and their templates."""
_IMPORTED = frozenset({"Any", "Backend", "Capabilities", "Execution", "Path", "Representation"})
"""Names that the module of the backend imports."""


class SkeletonError(Exception):
    """A skeleton that cannot be written; the message says why and what to do."""


def write_skeleton(name: str, parent: Path) -> Path:
    """Write the package ``name`` as a new folder in ``parent``, and return the folder.

    The name is used for the backend, its package and, in camel case, its class. Raises SkeletonError for a name that
    cannot be imported or is taken, and for a folder that exists or cannot be written.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or not name.islower():
        raise SkeletonError(f"{name!r} cannot name a package: use lower case letters, digits and _, such as my_npu")
    if class_of(name) in _IMPORTED:
        raise SkeletonError(
            f"the class of {name!r} would be {class_of(name)}, which its module imports: choose another"
        )
    folder = parent / name
    if folder.exists():
        raise SkeletonError(f"{folder} is there already: choose another name, or remove it")
    spec = find_spec(name)
    if name in SHIPPED or spec is not None:
        owner = "a backend of the suite" if spec is None else f"the module {spec.origin or name}"
        raise SkeletonError(f"the name {name!r} is taken by {owner}: choose another, such as {name}_backend")
    try:
        for path, text in render_files(name).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SkeletonError(f"{folder} cannot be written: {error.strerror}") from None
    return folder


def class_of(name: str) -> str:
    """Return the name of the backend's class, such as MyNpu for my_npu."""
    return "".join(word.capitalize() for word in name.split("_"))


def render_files(name: str) -> dict[str, str]:
    """Return the text of each file of the package ``name``, by path."""
    environment = Environment(
        loader=PackageLoader("fx_quant_conformance.conformance.scaffold"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # Python, TOML and YAML; the name is an identifier
    )
    words = {"name": name, "class_name": class_of(name)}
    return {path.format(name=name): environment.get_template(file).render(words) for path, file in FILES.items()}
