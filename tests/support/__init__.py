"""What the tests run against: real servers, real workers, and a network that can fail.

Every server is a local process on a free port of 127.0.0.1 with its own temporary directory. A
server whose program is not installed is an error that names the install command, never a skip.
"""

from tests.support.clock import ServerClock
from tests.support.disk import SmallDisk
from tests.support.filesystem_broker import filesystem_settings
from tests.support.mariadb import MariaDBServer
from tests.support.pgbouncer import PgBouncerServer
from tests.support.postgres import PostgresServer
from tests.support.process import LocalProcess, ProcessFailed, is_alive
from tests.support.producers import Producers
from tests.support.proxy import TcpProxy
from tests.support.rabbitmq import RabbitMQServer
from tests.support.redis import RedisServer, ValkeyServer
from tests.support.redis_groups import RedisCluster, RedisSentinels
from tests.support.server import Server, ServerNotInstalled
from tests.support.tls import TlsRedisServer
from tests.support.waiting import eventually, quickest
from tests.support.worker import Worker

__all__ = [
    "LocalProcess",
    "MariaDBServer",
    "PgBouncerServer",
    "PostgresServer",
    "ProcessFailed",
    "Producers",
    "RabbitMQServer",
    "RedisCluster",
    "RedisSentinels",
    "RedisServer",
    "Server",
    "ServerClock",
    "ServerNotInstalled",
    "SmallDisk",
    "TcpProxy",
    "TlsRedisServer",
    "ValkeyServer",
    "Worker",
    "eventually",
    "filesystem_settings",
    "is_alive",
    "quickest",
]
