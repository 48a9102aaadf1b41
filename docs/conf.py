"""Sphinx configuration: ``python -m sphinx -W --keep-going docs docs/_build`` (extra ``docs``)."""

import re
import sys
from pathlib import Path

import kvfast

sys.path.insert(0, str(Path(__file__).parent))
import tables

project = "kvfast"
release = version = kvfast.__version__
copyright = "the kvfast authors, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"kvfast {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_heading_anchors = 3
myst_enable_extensions = ["tasklist"]  # the checklists of CONTRIBUTING.md

# Docstrings are numpydoc, and `name` in one of them is a name of its module or class.
default_role = "py:obj"
autodoc_member_order = "groupwise"
autodoc_typehints = "none"
numpydoc_show_class_members = False  # autodoc lists them


def _fill_tables(app, docname, source):
    source[0] = re.sub(r"^\|.*$", _pairs_in_a_line, tables.fill(source[0]), flags=re.MULTILINE)


def _pairs_in_a_line(row):
    """A row of a table whose pairs of figures do not break over lines."""
    return re.sub(r"(?<=\d) (?=[/(])|(?<=\d /) (?=\d)", "\xa0", row[0])


def setup(app):
    app.connect("source-read", _fill_tables)
