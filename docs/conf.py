"""Sphinx configuration; run by `nox -s docs` with warnings as errors."""

from __future__ import annotations

from shoal_mesh import __version__

project = "shoal"
author = "The shoal authors"
project_copyright = "2026, The shoal authors"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "examples"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "imported-members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes stay in the class docstring: autodoc lists them as members already

html_theme = "alabaster"
html_theme_options = {"description": "Sharded tensors in four layers", "fixed_sidebar": True, "page_width": "1080px"}
html_show_sourcelink = False
