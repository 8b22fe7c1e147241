"""The page that carries the front end: served, or as one file under a strict content policy."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

from dualform.errors import DualformError

SERVED_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def asset(name: str) -> str:
    """A file of the front end: "app.js", "app.css", "widget.js" or "widget.css"."""
    found = files("dualform.explore").joinpath("assets", name)
    if not found.is_file():
        raise DualformError(
            f"the explorer's front end is not built ('{name}' is missing); build it by installing "
            "the package: pip install -e . in the repository, or pip install dualform."
        )
    return found.read_text("utf-8")


def served_page() -> str:
    """The page as the server gives it: everything else is fetched from the same place."""
    return _page(
        "dualform",
        '<link rel="stylesheet" href="/assets/app.css">',
        '<script type="module" src="/assets/app.js"></script>',
    )


def report_page(title: str, data: Any) -> str:
    """The page as one file: script, style and data are inside, and nothing else can be loaded."""
    script, style = asset("app.js"), asset("app.css")
    if "</script" in script.lower() or "</style" in style.lower():
        raise DualformError("the front end cannot be put into a page: it closes its own tags.")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    carried = f'<script type="application/json" id="carried">{harmless_json(data)}</script>'
    return _page(title, head, f'{carried}\n<script type="module">{script}</script>')


def harmless_json(value: Any) -> str:
    """JSON that can stand inside a page: no tag can begin in it, and no half of a character.

    >>> harmless_json({"label": "</script><img onerror=…>"})
    '{"label":"\\\\u003c/script>\\\\u003cimg onerror=\\\\u2026>"}'
    """
    return json_text(value).replace("<", "\\u003c")


def json_text(value: Any) -> str:
    """Strict JSON; a number that was not measured is null.

    >>> json_text({"remainder": float("nan")})
    '{"remainder":null}'
    """
    return json.dumps(finite(value), allow_nan=False, separators=(",", ":"))


def finite(value: Any) -> Any:
    """The same with None where a number is not finite: JSON knows no others."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _page(title: str, head: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'  # or browsers ask for one
        f"<title>{escape(title)}</title>\n{head}\n</head>\n<body>\n"
        '<div id="app"><noscript>The explorer needs JavaScript.</noscript></div>\n'
        f"{body}\n</body>\n</html>\n"
    )
