"""The server of ``celery unique web``: who may see the pages, and how they are sent.

Every reply but the form for the token, the style sheet and the icon needs the token: in the
address, from where it moves into a cookie; in that form; or as ``Authorization: Bearer``. Nothing
that a visitor sends changes anything but that visitor's own cookie.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from celery_unique.config.app_state import AppState
from celery_unique.exceptions import CeleryUniqueError

from .pages import Pages

logger = logging.getLogger("celery_unique")

#: A visitor who sends nothing for so long, or reads nothing, is cut off.
PATIENCE_S = 15.0
#: Each page may walk the store: more at once would take its time from the workers.
PAGES_AT_ONCE = 4
LONGEST_FORM = 4096
LONGEST_QUERY = 8192

HEADERS = {
    # No script, nothing from elsewhere, and in no frame.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
HTML = "text/html; charset=utf-8"
#: Sent to anybody: they say nothing of the locks.
FILES = {"/web.css": "text/css; charset=utf-8", "/icon.svg": "image/svg+xml"}


class PageServer(ThreadingHTTPServer):
    daemon_threads = True  # a slow visitor does not keep the command from ending

    def __init__(
        self, address: tuple[str, int], app_state: AppState, token: str, program: str
    ) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, Handler)
        self.token = token
        self.pages = Pages(app_state, program)
        self.walks = threading.BoundedSemaphore(PAGES_AT_ONCE)
        # Cookies are sent to every port of a host, so that this is not the token, and is worth
        # nothing to another server, nor after the end of this one.
        self.cookie = f"celery_unique_{self.server_port}"
        key = secrets.token_bytes(32)
        self._session = hmac.new(key, token.encode(), hashlib.sha256).hexdigest()

    @property
    def address(self) -> str:
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"

    @property
    def session_cookie(self) -> str:
        return f"{self.cookie}={self._session}; HttpOnly; SameSite=Strict; Path=/"

    def is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.token.encode())

    def is_session(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._session.encode())

    def serve_until_interrupted(self) -> None:
        """Until Ctrl-C, or until a supervisor stops it."""
        # Also Ctrl-C: a shell's background process would ignore it.
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(each, signal.default_int_handler) for each in numbers]
        try:
            self.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            for each, handler in zip(numbers, before, strict=True):
                signal.signal(each, handler)
            self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A visitor who has gone away is no error."""
        logger.debug("lost a visitor of the pages: %s", sys.exception())


class Handler(BaseHTTPRequestHandler):
    """One request. Connections are closed after it: HTTP/1.0."""

    server: PageServer
    server_version = "celery-unique"
    sys_version = ""
    timeout = PATIENCE_S

    # -- methods -------------------------------------------------------------
    def do_GET(self) -> None:
        target = urlsplit(self.path)
        if len(target.query) > LONGEST_QUERY:
            self._send_page(
                HTTPStatus.REQUEST_URI_TOO_LONG, self.server.pages.message("Too long", "")
            )
            return
        # Of a parameter that is repeated, the last one counts.
        query = dict(parse_qsl(target.query, errors="replace"))
        if target.path in FILES:
            self._send_file(target.path)
        elif target.path == "/favicon.ico":
            self._send(HTTPStatus.NO_CONTENT, b"", HTML)
        elif self._may_see():
            # Also here the token leaves the address, which a browser keeps in its history.
            if "token" in query:
                self._redirect(target.path, query)
            else:
                self._show(target.path, query)
        elif self.server.is_token(query.get("token", "")):
            self._redirect(target.path, query, ("Set-Cookie", self.server.session_cookie))
        else:
            wrong = "token" in query
            self._send_page(HTTPStatus.UNAUTHORIZED, self.server.pages.login(wrong=wrong))

    do_HEAD = do_GET  # noqa: N815  by this name; _send leaves out the body

    def do_POST(self) -> None:
        """Only the form for the token."""
        if urlsplit(self.path).path != "/login":
            self._refuse_method()
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 8):
            self._send_page(HTTPStatus.LENGTH_REQUIRED, self.server.pages.login(wrong=True))
        elif int(length) > LONGEST_FORM:
            self._send_page(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self.server.pages.login(wrong=True)
            )
        else:
            form = dict(parse_qsl(self.rfile.read(int(length)).decode("utf-8", "replace")))
            if self.server.is_token(form.get("token", "").strip()):
                self._redirect("/", {}, ("Set-Cookie", self.server.session_cookie))
            else:
                self._send_page(HTTPStatus.UNAUTHORIZED, self.server.pages.login(wrong=True))

    def _refuse_method(self) -> None:
        page = self.server.pages.message("Not possible", "These pages change nothing.")
        self._send_page(HTTPStatus.METHOD_NOT_ALLOWED, page, ("Allow", "GET, HEAD"))

    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse_method  # noqa: N815

    # -- who -----------------------------------------------------------------
    def _may_see(self) -> bool:
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.server.is_token(given.strip())
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return False
        found = cookies.get(self.server.cookie)
        return found is not None and self.server.is_session(found.value)

    # -- what ----------------------------------------------------------------
    def _show(self, path: str, query: dict[str, str]) -> None:
        pages, page = self.server.pages, self._pages().get(path)
        if page is None:
            self._send_page(HTTPStatus.NOT_FOUND, pages.message("No such page", ""))
        elif not self.server.walks.acquire(timeout=PATIENCE_S):
            busy = pages.message("Busy", "Too many pages are being made: try again.")
            self._send_page(HTTPStatus.SERVICE_UNAVAILABLE, busy, ("Retry-After", "10"))
        else:
            try:
                status, text = HTTPStatus.OK, page(query)
            except CeleryUniqueError as error:
                status = HTTPStatus.SERVICE_UNAVAILABLE
                text = pages.message("The locks cannot be shown", str(error))
            except Exception:
                logger.exception("cannot make a page of locks")
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                text = pages.message("This page has failed", "The log of the command has more.")
            finally:
                self.server.walks.release()
            self._send_page(status, text)

    def _pages(self) -> dict[str, Callable[[dict[str, str]], str]]:
        pages = self.server.pages
        return {"/": pages.locks, "/lock": pages.lock, "/why": pages.why, "/stats": pages.stats}

    # -- how -----------------------------------------------------------------
    def _redirect(self, path: str, query: dict[str, str], *headers: tuple[str, str]) -> None:
        """To the same page without the token. Relative: a proxy may serve it below a prefix."""
        kept = urlencode({name: value for name, value in query.items() if name != "token"})
        # Only to a page of ours: a path could name another host.
        page = path[1:] if path in self._pages() else ""
        where = f"./{page}" + (f"?{kept}" if kept else "")
        self._send(HTTPStatus.SEE_OTHER, b"", HTML, ("Location", where), *headers)

    def _send_file(self, path: str) -> None:
        body = files(__package__).joinpath(path[1:]).read_bytes()
        self._send(HTTPStatus.OK, body, FILES[path])

    def _send_page(self, status: HTTPStatus, text: str, *headers: tuple[str, str]) -> None:
        self._send(status, text.encode("utf-8", "backslashreplace"), HTML, *headers)

    def _send(
        self, status: HTTPStatus, body: bytes, content_type: str, *headers: tuple[str, str]
    ) -> None:
        self.send_response(status)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
        for name, value in (*HEADERS.items(), *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Of the standard library for what is not HTTP: with our headers, and without its text."""
        status = HTTPStatus(code)
        if status == HTTPStatus.NOT_IMPLEMENTED:  # a method without a function here
            self._refuse_method()
        else:
            self._send_page(status, self.server.pages.message(status.phrase, ""))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its name there
        """The standard library would print addresses with tokens and keys."""
        logger.debug("served a page of locks: %s", self.command)
