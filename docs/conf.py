"""Sphinx configuration: ``python -m sphinx -W --keep-going docs docs/_build`` (extra ``docs``)."""

import sys
from pathlib import Path

import kvfast

sys.path.insert(0, str(Path(__file__).parent))
import tables

project = "kvfast"
release = version = kvfast.__version__
copyright = "the kvfast authors, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"kvfast {release}"

myst_heading_anchors = 3
myst_enable_extensions = ["tasklist"]  # the checklists of CONTRIBUTING.md

# Docstrings are numpydoc, and `name` in one of them is a name of its module or class.
default_role = "py:obj"
autodoc_member_order = "groupwise"
autodoc_typehints = "none"
numpydoc_show_class_members = False  # autodoc lists them


def _fill_tables(app, docname, source):
    source[0] = tables.fill(source[0])


def setup(app):
    app.connect("source-read", _fill_tables)
