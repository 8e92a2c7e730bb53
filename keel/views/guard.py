"""Who may see the pages of `keel ui`: whoever has the link, in a browser on this machine.

Every request needs the token, from the link or, after the first visit, from an HttpOnly cookie. Its
Host has to be this machine by a local name (a name of another site could be made to resolve to
127.0.0.1), and a foreign Origin is refused. Pages load nothing from elsewhere, by their own
Content-Security-Policy too. Any local port may stand in Host: ssh forwards from other ports.
"""

import hmac
from collections.abc import Awaitable, Callable
from urllib.parse import quote, urlencode, urlsplit

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse

from protocol.files import digest

LOCAL_HOSTS = {"127.0.0.1", "localhost", "::1"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",  # Plotly sets styles of elements
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",  # the token is in the first link
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
Next = Callable[[Request], Awaitable[Response]]


class Guard:
    """Middleware that answers who has the token, a local Host and no foreign Origin."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.cookie = f"keel-ui-{digest(token.encode())[:8]}"

    async def __call__(self, request: Request, answer: Next) -> Response:
        """One request."""
        response = self.refusal(request) or self.first_visit(request) or await answer(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    def refusal(self, request: Request) -> Response | None:
        """Why a request is refused; None if it is not."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if hostname(host) not in LOCAL_HOSTS:
            return PlainTextResponse("refused: the Host is not this machine\n", 403)
        if origin is not None and origin != f"http://{host}":
            return PlainTextResponse("refused: the request comes from another site\n", 403)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("refused: these pages change nothing\n", 405)
        token = request.query_params.get("token") or request.cookies.get(self.cookie, "")
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            text = "refused: open the link that `keel ui` printed: it has the token\n"
            return PlainTextResponse(text, 403)
        return None

    def first_visit(self, request: Request) -> Response | None:
        """Store the token of the link as a cookie and remove it from the address."""
        if "token" not in request.query_params:
            return None
        rest = [(k, v) for k, v in request.query_params.multi_items() if k != "token"]
        # "//host" and "/\\host" would lead elsewhere
        path = "/" + quote(request.scope["path"].lstrip("/"))
        target = path + (f"?{urlencode(rest)}" if rest else "")
        response = Response(status_code=303, headers={"location": target})
        response.set_cookie(self.cookie, self.token, httponly=True, samesite="lax", path="/")
        return response


def hostname(host: str) -> str | None:
    """The name in a Host header; None if there is none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
