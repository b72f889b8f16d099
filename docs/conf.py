"""Build the documentation with Sphinx: `make docs`, offline, with every warning as an error."""

import logging
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the gallery's times are those of one thread
sys.path.insert(0, str(Path(__file__).parent))

from docstrings import convert_docstring

import structured_ensembles

project = "structured-ensembles"
author = "The structured-ensembles developers"
project_copyright = author
release = version = structured_ensembles.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_gallery.gen_gallery", "mathml"]
exclude_patterns = ["_build", "gallery"]  # sphinx-gallery writes its pages into auto_gallery/
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # signatures name types of torch and of ours that have no page

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3  # links such as results.md#targets work as on GitHub

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_signature": False,
    "remove_config_comments": True,
    "write_computation_times": False,
}

html_math_renderer = "mathml"
pygments_dark_style = "github-dark"
html_theme = "furo"
html_title = "structured-ensembles"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_sphinx = False


# Patterns order the tables of contents, and "*" adds the pages that no other pattern names: none, for most of them.
logging.getLogger("sphinx.sphinx.directives.other").addFilter(lambda record: "glob pattern" not in record.getMessage())


def replace_links(app: object, page: str, source: list[str]) -> None:
    """Make links to Markdown files of the repository's root, such as SECURITY.md, downloads; unlink its folders."""
    source[0] = re.sub(r"\[([^\]]+)\]\(((?:\.\./)+[A-Z]+\.md)\)", r"{download}`\1 <\2>`", source[0])
    source[0] = re.sub(r"\[([^\]]+)\]\((?:\.\./)+[\w/-]*/\)", r"`\1`", source[0])


def setup(app: object) -> None:
    """Convert docstrings and links of pages before they are parsed."""
    app.connect("autodoc-process-docstring", convert_docstring)  # type: ignore[attr-defined]
    app.connect("source-read", replace_links)  # type: ignore[attr-defined]
