"""How the documentation is built:
``python -m sphinx -W --keep-going -b html docs docs/_build/html``.

The pages are Markdown (MyST), so that they read well without Sphinx too. The reference is made from
docstrings. A public name is documented under `polycephaly` or `polycephaly.green`, whatever module
it is written in.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pygments.lexers.python import PythonLexer

sys.path.insert(0, str(Path(__file__).parents[1]))

import polycephaly

project = "Polycephaly"
version = release = polycephaly.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
napoleon_google_docstring = False
napoleon_use_ivar = True
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"Polycephaly {release}"
html_copy_source = False
html_show_copyright = False
highlight_language = "text"  # of blocks that do not say
myst_heading_anchors = 3

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 250  # with the names of modules, which are not shown
add_module_names = False

# A name of ours that leads nowhere is a warning, and so an error. What is not ours has no page
# here; and in docstrings a name in lower case is most often a parameter.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(asyncio|collections|concurrent|contextlib|multiprocessing|numpy|os|time"
              r"|types|typing|zmq)\..*"),
    ("py:.*", r"(Any|Callable|Coroutine|Awaitable|Generator|Mapping|Sequence|Executor|Future"
              r"|(Async)?Itera(ble|tor))"),
    ("py:obj", r"Parallel"),
    ("py:class", r"SeedLike"),  # the parameter says what that is
    # Types in NumPy style are prose.
    ("py:class", r"[a-z_ ]+|default .*"),
    ("py:class", r"[{\"].*"),
    ("py:exc", r"io\..*"),
    ("py:.*", r"(str|int|float|bool|bytes|dict|list|tuple|object|property"
              r"|[A-Z]\w*(Error|Interrupt|Group))"),
    ("py:class", r"polycephaly\.[\w.]+\.[A-Z]\d?"),  # type variables
    ("py:class", r"[A-Z]\d?"),
    ("py:obj", r"[a-z_0-9]+((=| |\().*)?"),
]  # fmt: skip


# Made by a function or method of ours: how they are constructed is not for users.
MADE_ELSEWHERE = {
    "Claim",
    "GreenThread",
    "Guard",
    "Line",
    "ListOrAwaitable",
    "Receiver",
    "RemoteDrone",
    "RemotePool",
    "Results",
    "Sender",
    "Server",
    "Shared",
}


def lead_home(app, env, node, contnode):  # type: ignore[no-untyped-def]
    """`polycephaly.promises.promise.Promise` in an annotation is `polycephaly.Promise` here;
    `Pool.map` says enough."""
    domain = env.get_domain("py")
    target = node.get("reftarget", "")
    if target.islower() and "." not in target:  # most often a parameter
        return None
    for wanted in (target, target.rpartition(".")[2]):
        names = [
            name
            for name, entry in domain.objects.items()
            if name.endswith(f".{wanted}") and not entry.aliased
        ]
        if len(names) == 1:
            return domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", names[0], node, contnode
            )
    return None


def hide_constructor(app, what, name, obj, options, signature, returns):  # type: ignore[no-untyped-def]
    if what == "class" and name.rpartition(".")[2] in MADE_ELSEWHERE:
        return "", returns
    return None


def setup(app):  # type: ignore[no-untyped-def]
    app.add_lexer("ipython", PythonLexer)  # IPython has one of its own, where it is installed
    app.connect("missing-reference", lead_home)
    app.connect("autodoc-process-signature", hide_constructor)
