"""Who may ask the server, and what a browser may do with its answers."""

from __future__ import annotations

import ipaddress
import json
import secrets
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualform.explore.page import SERVED_POLICY

LONGEST_URL = 60_000
COOKIE = "dualform"
HEADERS = {
    "Content-Security-Policy": SERVED_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class RequestGuard:
    """Lets in only who reached the server under its own name, from its own page.

    A page of a stranger can send a browser to a local server, by its address or by a name that
    it points there. The browser then says so: in Host, Origin and Sec-Fetch-Site.
    """

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers itself where somebody is not let in; adds the headers to every answer."""
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._refusal(scope, Headers(scope=scope)) or self._entrance(scope)
        await (answer or self._app)(scope, receive, with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return refused(405, f"{scope['method']} is not understood; everything here is GET.")
        if len(scope["raw_path"]) + len(scope["query_string"]) > LONGEST_URL:
            return refused(413, f"the request is longer than {LONGEST_URL:,} characters.")
        host = headers.get("host", "")
        if self._token is None and not is_loopback(_name(host)):
            return refused(403, "this server answers under its own address only, not another name.")
        origin = headers.get("origin")
        if origin is not None and origin != f"{scope['scheme']}://{host}":
            return refused(403, "this server answers its own pages only.")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return refused(
                403, "this server answers its own pages only; open its address yourself."
            )
        return None

    def _entrance(self, scope: Scope) -> Response | None:
        """With a token: a cookie for who brings it, and nothing for who does not."""
        if self._token is None or self._is_token(_cookie(Headers(scope=scope))):
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[-1]
        if not self._is_token(given):
            return refused(403, "the token is missing or wrong; open the address that was printed.")
        entered = RedirectResponse(scope["path"], status_code=303)
        entered.set_cookie(COOKIE, given, httponly=True, samesite="strict")
        return entered

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), (self._token or "").encode())


def refused(status: int, why: str) -> Response:
    """An answer that says why there is none."""
    return Response(json.dumps({"error": why}), status, media_type="application/json")


def is_loopback(host: str) -> bool:
    """Whether a name or address can only be this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("evil.example")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _cookie(headers: Any) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""
