"""Sphinx configuration; run by `nox -s docs` with warnings as errors."""

from __future__ import annotations

import os
import re
import sys
from html import escape
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from textwrap import shorten
from typing import Any

from docutils import nodes

from shoal_mesh import __version__

project = "shoal"
author = "The shoal authors"
project_copyright = "2026, The shoal authors"
release = __version__

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

extensions = [
    "reference_pages",
    "shared_navigation",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["attrs_block", "colon_fence"]
myst_heading_anchors = 3
# a test runs the notebook, and its outputs are kept in the file
nb_execution_mode = "off"
# errors of one name in two packages: a docstring means its own
suppress_warnings = ["ref.python"]
# `names` of docstrings are code, and links where the name is known
default_role = "py:obj"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Names of torch and Python are links where their inventories can be read. Checks run without a
# network, so they are asked for only on request: SHOAL_DOCS_ONLINE=1 nox -s docs, which the
# published site is built with.
intersphinx_mapping = (
    {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }
    if os.environ.get("SHOAL_DOCS_ONLINE")
    else {}
)

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# Members that a class inherits from a base without an entry are listed with the class, except the
# members of these bases.
SHOWN_ELSEWHERE = (
    "object, BaseException, Enum, int, str, tuple, dict, Tensor, TensorBase, Module, Optimizer, "
    "TorchDispatchMode, "
    "TestCase, Protocol, Placement, ParallelStyle, DeclaredStyle, Lowered, ShardedTensorBase, "
    "ShardingSpec, Row, Rule"
)
autodoc_default_options = {
    "members": True,
    "imported-members": True,
    "show-inheritance": True,
    "inherited-members": SHOWN_ELSEWHERE,
}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# attributes stay in the class docstring: autodoc lists them as members already
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"shoal {release}"
html_logo = html_favicon = "_static/logo.svg"
# Where the published site is: Read the Docs sets both. A local build has no links to a source.
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")
html_theme_options: dict[str, Any] = {"top_of_page_buttons": []}
if os.environ.get("READTHEDOCS_GIT_CLONE_URL"):
    html_theme_options = {
        "top_of_page_buttons": ["view"],
        "source_repository": os.environ["READTHEDOCS_GIT_CLONE_URL"].removesuffix(".git"),
        "source_branch": "main",
        "source_directory": "docs/",
    }
html_static_path = ["_static"]
html_css_files = ["site.css"]
# guides before records of decisions and generated pages
html_search_scorer = str(Path(__file__).parent / "_static" / "search_scorer.js")
html_show_sourcelink = False


def leaves_out(
    _app: object, what: str, name: str, member: Any, skip: bool, options: object
) -> bool | None:
    """Leave out descriptors that only torch calls, and aliases of private classes."""
    internal = name in INTERNAL or type(member).__name__ == "_ClassNamespace"
    return True if internal else None


INTERNAL = {"copied_view", "pending"}


def names_bases(_app: object, _name: str, _class: type, _options: object, bases: list[Any]) -> None:
    """Leave out bases without an entry, which a reader cannot look up."""
    bases[:] = [base for base in bases if not is_internal(base)] or [object]


def is_internal(value: Any) -> bool:
    """Return whether a class of shoal is not in a public namespace."""
    home = getattr(value, "__module__", "").partition(".")[0]
    return home.startswith("shoal_") and value.__name__ not in import_module(home).__all__


def leaves_contract_out(
    _app: object, _what: str, _name: str, _value: Any, _options: object, text: list[str]
) -> None:
    """Leave out the contract of imports, the end of a module's docstring."""
    text[:] = takewhile(lambda line: not line.startswith("May import: "), text)


def keeps_aliases_home(_app: object, module: str, name: str) -> str | None:
    """An alias such as `dict[str, int]` claims to be of `builtins`, which has no source page."""
    value = getattr(import_module(module), name, None)
    return module if getattr(value, "__module__", "") == "builtins" else None


# namespaces of a package that have entries of their own
INNER = ("errors", "hf", "internal", "rules", "types")
BACKLINK = re.compile(r'(reference/shoal_\w+(?:/[\w-]+)?)\.html#(shoal_[\w.]+)"')


def mends_backlinks(
    app: Any, page: str, _template: str, context: dict[str, Any], _tree: object
) -> None:
    """Links from source to entries.

    Viewcode knows one namespace of a module, and entries may be in several.
    """
    documented = app.env.get_domain("py").objects

    def anchor(link: re.Match[str]) -> str:
        home, target = link.groups()
        package = home.split("/")[1]
        space, _, name = target.partition(".")
        # A package may re-export the name of a package below, whose page has the entry.
        places = [target, f"{package}.{name.rpartition('.')[2]}"]
        places += [f"{space}.{inner}.{name}" for inner in INNER]
        # viewcode may name a namespace in which a class has no page of its own
        inner, _, member = name.partition(".")
        if inner in INNER:
            places.append(f"{space}.{member}")
        entries = (place for place in places if place in documented)
        found = next((place for place in entries if documented[place].docname == home), target)
        return f'{home}.html#{found}"'

    if page.startswith("_modules/shoal_"):
        context["body"] = re.sub(BACKLINK, anchor, context["body"])


DESCRIPTION = (
    "One PyTorch program on many devices: device meshes, DTensor, FSDP2 and DDP, tensor, sequence, "
    "expert and context parallelism."
)


def describes_page(app: Any, page: str, _template: str, context: dict[str, Any], tree: Any) -> None:
    """Give a page its description and the tags of the card that a link to it shows."""
    title = re.sub(r"<[^>]+>", "", context.get("title", "")) or "shoal"
    text = first_paragraph(tree) or DESCRIPTION
    tags = {
        "og:type": "website",
        "og:site_name": "shoal",
        "og:title": title,
        "og:description": text,
    }
    base = app.config.html_baseurl.rstrip("/")
    if base:
        tags["og:url"] = f"{base}/{page}.html"
        tags["og:image"] = f"{base}/_static/card.png"
        tags["twitter:card"] = "summary_large_image"
    lines = [f'<meta name="description" content="{escape(text)}">']
    lines += [f'<meta property="{name}" content="{escape(value)}">' for name, value in tags.items()]
    context["metatags"] = context.get("metatags", "") + "\n".join(lines)


def first_paragraph(tree: Any) -> str:
    """Return a page's first sentences, at most 160 characters; empty for a page without text."""
    if tree is None:
        return ""
    for paragraph in tree.findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        # a line of a table or of a list says little
        if len(text) > 40 and isinstance(paragraph.parent, nodes.section):
            return shorten(text, 160, placeholder=" ...")
    return ""


RANKS = re.compile(r"^<!-- ranks: (\d+) -->$", re.MULTILINE)


def says_how_to_run(_app: object, page: str, source: list[str]) -> None:
    """Tell readers of a guide how to start it.

    A page that calls `launch` starts its ranks itself.
    """
    ranks = RANKS.search(source[0])
    guide = page.startswith(("how-to/", "concepts/"))
    if not guide or ranks is None or "print(launch(main" in source[0]:
        return
    line = (
        "To run this page, save its Python blocks in one file: "
        f"`torchrun --nproc-per-node {ranks[1]} page.py` starts it."
    )
    heading = "## Program\n"
    if heading in source[0]:
        source[0] = source[0].replace(heading, f"{heading}\n{line}\n", 1)
    else:
        source[0] = RANKS.sub(line, source[0])


def index_keywords(_app: object, _page: str, source: list[str]) -> None:
    """Make index entries of a page's line of keywords, which the search prefers to mere words."""
    line = re.search(r"^\*Keywords: (.+)\.\*$", source[0], re.MULTILINE)
    if line is None:
        return
    entries = ", ".join(f"! {keyword}" for keyword in line[1].split(", "))
    first_paragraph = re.search(r"^[^#<\s]", source[0], re.MULTILINE)
    assert first_paragraph is not None, "the line of keywords is a paragraph"
    start = first_paragraph.start()
    source[0] = f"{source[0][:start]}```{{index}} {entries}\n```\n\n{source[0][start:]}"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", index_keywords)
    app.connect("source-read", says_how_to_run)
    app.connect("autodoc-skip-member", leaves_out)
    app.connect("autodoc-process-bases", names_bases)
    app.connect("autodoc-process-docstring", leaves_contract_out)
    app.connect("viewcode-follow-imported", keeps_aliases_home)
    app.connect("html-page-context", mends_backlinks)
    app.connect("html-page-context", describes_page)
