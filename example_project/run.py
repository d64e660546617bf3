#!/usr/bin/env python3
"""Run the example shop: web server, worker and beat, and Flower where the broker is Redis.

Everything stays on this machine. Ctrl-C stops it all. What the shop writes is in var/, or in
SHOP_DATA; messages and locks are in Redis if SHOP_REDIS_URL names one.
"""

import argparse
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
HOST = "127.0.0.1"
USER = PASSWORD = "shop"
START_S, STOP_S = 60, 15


class ShopFailed(Exception):
    """The message describes the problem, and the exit code is 1."""


class Child(NamedTuple):
    name: str
    process: subprocess.Popen
    log: Path

    def tail(self):
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-20:])


def main():
    options = parse()
    # As for Ctrl-C, so that the children are stopped. In a background job of a shell Ctrl-C is
    # ignored unless a handler is set.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        run(options)
    except KeyboardInterrupt:
        print("\nThe shop is closed.")
    except ShopFailed as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    return 0


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8000, help="of the web server (default: 8000)")
    parser.add_argument("--flower-port", type=int, default=5555, help="default: 5555")
    parser.add_argument("--no-flower", action="store_true", help="do without Flower")
    parser.add_argument("--fresh", action="store_true", help="delete what the last run left")
    return parser.parse_args()


def data_directory(*, fresh):
    data = Path(os.environ.get("SHOP_DATA", HERE / "var")).resolve()
    data.mkdir(parents=True, exist_ok=True)
    try:
        fcntl.flock(os.open(data, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ShopFailed(f"Another shop is running in {data}. SHOP_DATA names another.") from None
    if fresh and (data / "shop.sqlite3").exists():  # otherwise it may be a directory of the user's
        for path in data.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.environ["SHOP_DATA"] = str(data)
    return data


def run(options):
    redis_url = os.environ.get("SHOP_REDIS_URL", "")
    with_flower = bool(redis_url) and not options.no_flower
    check_free(options.port, "--port")
    if with_flower:
        check_free(options.flower_port, "--flower-port")
        os.environ["SHOP_FLOWER_URL"] = f"http://{HOST}:{options.flower_port}/"
    data = data_directory(fresh=options.fresh)
    print("Preparing the database ...", flush=True)
    prepare_database()

    with ExitStack() as stack:
        children = start_all(stack, data, options, with_flower)
        show(address_of(options), data, redis_url)
        try:
            watch(children)
        finally:
            for child in children:  # all at once: each takes its time
                child.process.terminate()


def start_all(stack, data, options, with_flower):
    """The children, when all of them are at work."""

    def start(name, *command):
        return stack.enter_context(running(name, command, data / f"{name}.log"))

    print("Starting worker, beat and web server ...", flush=True)
    celery = (sys.executable, "-m", "celery", "-A", "config")
    runserver = (sys.executable, "manage.py", "runserver", "--noreload")
    quick = ("--loglevel", "INFO", "--without-gossip", "--without-mingle")
    pid_file = data / "beat.pid"
    pid_file.unlink(missing_ok=True)  # of a shop that was killed
    worker = start("worker", *celery, "worker", "--concurrency", "3", *quick)
    web = start("web", *runserver, f"{HOST}:{options.port}")
    beat = start("beat", *celery, "beat", "--loglevel", "INFO", "--pidfile", str(pid_file))
    children = [worker, web, beat]
    wait_until(lambda: " ready." in worker.log.read_text(errors="replace"), children)
    wait_until(lambda: answers(address_of(options)), children)
    if with_flower:
        at = (f"--address={HOST}", f"--port={options.flower_port}")
        children.append(start("flower", *celery, "flower", *at))
        wait_until(lambda: answers(os.environ["SHOP_FLOWER_URL"]), children)
    return children


def address_of(options):
    return f"http://{HOST}:{options.port}/"


def prepare_database():
    os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings"
    import django
    from django.core.management import call_command
    from django.db import DatabaseError, connections

    try:
        django.setup()
        call_command("migrate", verbosity=0)
        add_user()
    except DatabaseError as error:
        raise ShopFailed(f"The database could not be made ready: {error}") from error
    finally:
        connections.close_all()


def add_user():
    """For the admin page. The password is no secret: the shop is served on this machine only."""
    from django.contrib.auth.models import User

    if not User.objects.filter(username=USER).exists():
        User.objects.create_superuser(USER, password=PASSWORD)


def show(address, data, redis_url):
    where = (
        "Redis" if redis_url else "files and SQLite (SHOP_REDIS_URL=redis://... puts them there)"
    )
    print(
        f"""
  The shop      {address}
  Admin page    {address}admin/  (user {USER}, password {PASSWORD})
  Flower        {os.environ.get("SHOP_FLOWER_URL") or "only with Redis"}
  Messages and locks are in {where}
  Logs, mails and the database are in {data}

Ctrl-C stops it.""",
        flush=True,
    )


# -- The children ----------------------------------------------------------------------------------


@contextmanager
def running(name, command, log):
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=HERE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us; we stop it, and its pool with it
        )
    try:
        yield Child(name, process, log)
    finally:
        stop(process)


def stop(process):
    deadline = time.monotonic() + STOP_S
    process.terminate()
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(KeyboardInterrupt):  # a second Ctrl-C must not leave anything running
            time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def watch(children):
    while True:
        check_alive(children)
        time.sleep(0.5)


def wait_until(holds, children):
    deadline = time.monotonic() + START_S
    while not holds():
        check_alive(children)
        if time.monotonic() > deadline:
            tails = "\n\n".join(f"{child.name}:\n{child.tail()}" for child in children)
            raise ShopFailed(f"The shop was not ready after {START_S} seconds.\n{tails}")
        time.sleep(0.1)


def check_alive(children):
    for child in children:
        if child.process.poll() is not None:
            code = child.process.returncode
            raise ShopFailed(f"{child.name} ended with code {code}. Its log ends:\n{child.tail()}")


def check_free(port, option):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            raise ShopFailed(
                f'Port {port} is taken. Choose another one: make example ARGS="{option} {port + 1}"'
            ) from None


def answers(address):
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(main())
