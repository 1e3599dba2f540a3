"""The site: how Sphinx reads docs/. `python3 ci/docs.py` builds it.

Pages are Markdown that reads well on a code host too. Beside them this makes docs/api, with a page for each public name
from its docstring.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import NoUri

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import unidist  # noqa: E402 - found by the line above
from unidist.names import WHERE, load  # noqa: E402

project = "unidist"
author = "the authors of unidist"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "_build_doctrees"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_use_index = False
html_title = "unidist"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
templates_path: list[str] = []
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5fa5", "color-brand-content": "#0b5fa5"},
    "dark_css_variables": {"color-brand-primary": "#7ab8f5", "color-brand-content": "#7ab8f5"},
}
# Programs are copied without their prompts and what they print.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# One argument a line where a signature is longer.
maximum_signature_line_length = 70
autodoc_member_order = "bysource"
napoleon_use_rtype = False
# Single backticks in docstrings are code.
default_role = "code"
# Types of signatures that have no page here, an error of the launcher, and what Python says of a mapping's own methods:
# what stands before a colon in a property's docstring is read as its type.
nitpick_ignore_regex = [
    ("py:class", r"(unidist|os|pathlib|collections|numpy)\..*"),
    ("py:class", r"(a set-like object|an object) providing a view .*|The layout"),
    ("py:exc", "LaunchError"),
]

GROUPS = {
    "Begin": "use backend backends register initialize shutdown process_index process_count list_devices notebook_run",
    "Strategies": "DataParallel ModelParallel TensorParallelKeras parallelize LayoutMap plan Plan",
    "Look": "describe draw Picture gather_weights ledger Ledger Telemetry",
    "Save and go on": "Checkpoint save restore",
    "Arrays": "Mesh Layout DistributedArray distribute from_local all_reduce reduce_scatter all_gather all_to_all "
    "broadcast permute barrier",
    "Errors": " ".join(sorted(name for name in WHERE if name.endswith("Error"))),
}
# Methods that Keras calls, or that are the model's own, are left out.
MEMBERS = {
    "Checkpoint": "",
    "Telemetry": "",
    "TensorParallelKeras": "   :members: get_parallelism_info, get_gradient_sharding_info\n",
}


def write_api(app: Sphinx) -> None:
    """docs/api: an index, and a page for each public name."""
    for name in WHERE:
        # `ledger` is the name of a module too, which Sphinx would find in its place.
        setattr(unidist, name, load(name))
    folder = HERE / "api"
    folder.mkdir(exist_ok=True)
    groups = {head: names.split() for head, names in GROUPS.items()}
    others = sorted(set(WHERE) - {name for names in groups.values() for name in names})
    wanted = {"index.rst": _index({**groups, "Others": others} if others else groups)}
    wanted |= {f"{_file(name)}.rst": _page(name) for name in WHERE}
    for old in folder.iterdir():
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text)


def _file(name: str) -> str:
    """`plan` and `Plan` would be one file where names of files have no case."""
    return f"{name}-class" if name[0].isupper() and name.lower() in WHERE else name


def _index(groups: dict[str, list[str]]) -> str:
    begun = "Every public name is an attribute of ``unidist``, and has a page with an example."
    parts = [f"API reference\n=============\n\n{begun}\n"]
    for head, names in groups.items():
        rows = "\n".join(f"   * - :doc:`{name} <{_file(name)}>`\n     - {_summary(name)}" for name in names)
        listed = "\n".join(f"   {_file(name)}" for name in names)
        parts.append(f"{head}\n{'-' * len(head)}\n\n.. list-table::\n   :class: names\n   :widths: 30 70\n\n{rows}\n")
        parts.append(f".. toctree::\n   :hidden:\n\n{listed}\n")
    return "\n".join(parts)


def _summary(name: str) -> str:
    """The first sentence of its docstring, whole."""
    text = " ".join((load(name).__doc__ or "").partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", text)[0]


def _page(name: str) -> str:
    kind = "class" if name[0].isupper() else "function"
    kind = "exception" if name.endswith("Error") else kind
    members = "" if kind == "function" else MEMBERS.get(name, "   :members:\n")
    return f"{name}\n{'=' * len(name)}\n\n.. auto{kind}:: unidist.{name}\n{members}"


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """What docs/contents.toml lists, at the end of the first page."""
    if page == "index":
        for caption, of in tomllib.loads((HERE / "contents.toml").read_text()).items():
            listed = "\n".join(of["pages"])
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


_NAMED = re.compile(r"unidist\.(\w+)(\(.*\))?$")


def link_names(app: Sphinx, tree: nodes.document, page: str) -> None:
    """`unidist.plan` in a text leads to its page, so that the Markdown needs no links for it."""
    for literal in list(tree.findall(nodes.literal)):
        found = _NAMED.match(literal.astext())
        inside = isinstance(literal.parent, nodes.reference | nodes.title) or page.startswith("api/")
        if found is None or found[1] not in WHERE or inside:
            continue
        try:
            target = app.builder.get_relative_uri(page, f"api/{_file(found[1])}")
        except NoUri:
            continue
        link = nodes.reference("", "", refuri=target, internal=True)
        literal.replace_self(link)
        link += literal


def as_restructured(app: Sphinx, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """Docstrings have Markdown's tables, and names of arguments with their stars; Sphinx reads reStructuredText."""
    read: list[str] = []
    for line in lines:
        line = re.sub(r"(?<![\w`*])\*{1,2}(?=\w+[,:])", "", line)
        if not line.startswith("|"):
            read.append(line)
        elif not line.startswith("|---"):
            if not read or not read[-1].startswith("     "):
                read += ["", ".. list-table::", ""]
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            read += [f"   {'*' if k == 0 else ' '} - {cell}" for k, cell in enumerate(cells)]
    lines[:] = read


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", write_api)
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", as_restructured, priority=400)  # before napoleon reads them
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
