"""``celery unique web``: the locks as pages in a browser, read-only."""

from __future__ import annotations

import ipaddress
import secrets

import click

from celery_unique.cli.options import lock_query, program
from celery_unique.cli.output import printable

#: A token that people choose could be guessed if it were shorter.
SHORTEST_TOKEN = 16


@click.command("web", short_help="Show the locks as pages in a browser.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8787,
    show_default=True,
    help="The port to listen on; 0: any free one.",
)
@click.option(
    "--token",
    envvar="CELERY_UNIQUE_WEB_TOKEN",
    help="What a visitor must know. Other users of this machine can read it in its list of "
    "processes: set CELERY_UNIQUE_WEB_TOKEN instead. Default: a new one at each start.",
)
@click.option(
    "--allow-remote",
    is_flag=True,
    help="Accept a --host that other machines reach. The pages are sent without TLS.",
)
@click.pass_context
def web_command(
    ctx: click.Context, /, host: str, port: int, token: str | None, allow_remote: bool
) -> None:
    """Show the locks as pages in a browser: a list with search, each key as in why, and counts.

    The pages change nothing. Visitors need the token, which is part of the address that is
    printed. Only this machine can reach them, unless --host and --allow-remote are given: then
    put a proxy with TLS before them. Ends with Ctrl-C.

    \b
    celery -A shop unique web
    celery -A shop unique web --port 9000
    ssh -L 8787:127.0.0.1:8787 web1   # from your own machine
    """
    from .server import PageServer

    if not allow_remote and not _is_loopback(host):
        raise click.UsageError(
            f"--host {printable(host)} can be reached from other machines, and the pages are sent "
            "without TLS. Listen on 127.0.0.1 and use ssh -L or a proxy with TLS, or confirm with "
            "--allow-remote."
        )
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise click.UsageError(
            f"The token has fewer than {SHORTEST_TOKEN} characters, so that it could be guessed. "
            "Give a longer one, or none: a new one is made."
        )
    command = lock_query(ctx, as_json=False)
    command.app_state.store.ping()
    try:
        server = PageServer(
            (host, port), command.app_state, token or secrets.token_urlsafe(32), program(ctx)
        )
    except OSError as error:
        raise click.UsageError(
            f"Could not listen on {printable(host)} port {port}: {error.strerror}. "
            "Choose another one with --port."
        ) from None
    command.screen.line(f"Locks of {printable(command.app_state.app.main or 'the app')}:")
    # A token of the caller is not repeated: this output may be kept in a log.
    command.screen.line(server.address if token else f"{server.address}?token={server.token}")
    command.screen.line("Press Ctrl-C to stop.", err=True)
    server.serve_until_interrupted()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
