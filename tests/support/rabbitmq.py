"""RabbitMQ, without its management plug-in."""

from __future__ import annotations

import os
import subprocess
from typing import ClassVar

import amqp

from tests.support.process import LocalProcess
from tests.support.server import HOST, Server, find_program, free_port

INSTALL = "apt-get install rabbitmq-server"
# Debian's own rabbitmq-server in /usr/sbin insists on running as the rabbitmq user.
PROGRAMS = "/usr/lib/rabbitmq/bin"
VHOSTS_AT_ONCE = 10


class RabbitMQServer(Server):
    """A RabbitMQ node with ports, name, cookie and port mapper (epmd) of its own."""

    start_timeout_s: ClassVar[float] = 60.0

    def __init__(self) -> None:
        super().__init__()
        self._dist_port = 0
        self._epmd_port = 0
        self._epmd: LocalProcess | None = None
        self._vhosts_made = 0
        self._fresh_vhosts: list[str] = []

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{HOST}:{self.port}//"

    def fresh_url(self) -> str:
        """The URL of a virtual host that nothing has used yet."""
        if not self._fresh_vhosts:
            self._make_vhosts()
        return f"amqp://guest:guest@{HOST}:{self.port}/{self._fresh_vhosts.pop()}"

    def _make_vhosts(self) -> None:
        """Make some ahead: each rabbitmqctl command starts an Erlang machine, about 1 s."""
        names = [f"test{self._vhosts_made + n}" for n in range(VHOSTS_AT_ONCE)]
        statements = "".join(
            f'ok = rabbit_vhost:add(<<"{name}">>, <<"tests">>),'
            f'rabbit_auth_backend_internal:set_permissions(<<"guest">>, <<"{name}">>,'
            '<<".*">>, <<".*">>, <<".*">>, <<"tests">>),'
            for name in names
        )
        self.control("eval", f"{statements} ok.")
        self._vhosts_made += len(names)
        self._fresh_vhosts.extend(names)

    def control(self, *arguments: str) -> str:
        """Run rabbitmqctl on this node and return what it printed."""
        done = subprocess.run(
            [f"{PROGRAMS}/rabbitmqctl", "--node", self._node, *arguments],
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode != 0:
            raise RuntimeError(f"rabbitmqctl {arguments}: {done.stdout}{done.stderr}")
        return done.stdout

    @property
    def _node(self) -> str:
        return f"test{self.port}@localhost"

    def _choose_ports(self) -> None:
        self.port, self._dist_port, self._epmd_port = free_port(), free_port(), free_port()

    def _prepare(self) -> None:
        self._prepare_ports()

    def _prepare_ports(self) -> None:
        """Run epmd ourselves: RabbitMQ would start it as a daemon that outlives the node."""
        if self._epmd is not None:
            self._epmd.kill()
        self._epmd = LocalProcess(
            [
                find_program("epmd", install_command=INSTALL),
                *("-port", str(self._epmd_port), "-address", HOST),
            ],
            log_path=self._home / "epmd.log",
        )
        self._epmd.start()

    def _command(self) -> list[str]:
        return [find_program(f"{PROGRAMS}/rabbitmq-server", install_command=INSTALL)]

    def _environment(self) -> dict[str, str]:
        home = str(self._home)
        return {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": home,  # where Erlang keeps its cookie
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": HOST,
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_MNESIA_BASE": f"{home}/mnesia",
            "RABBITMQ_LOG_BASE": f"{home}/log",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONF_ENV_FILE": f"{home}/no-environment-file",
            "RABBITMQ_CONFIG_FILE": f"{home}/no-configuration-file",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{home}/enabled_plugins",
            # Less to start and less idle spinning on a machine of two cores.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none",
        }

    def _answers(self) -> bool:
        connection = amqp.Connection(host=f"{HOST}:{self.port}", connect_timeout=2)
        try:
            connection.connect()
            return bool(connection.connected)
        finally:
            connection.close()

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            if self._epmd is not None:
                self._epmd.kill()
