"""What the tests run against: real servers, real workers, and a network that can fail.

Every server is a local process on a free port of 127.0.0.1 with its own temporary directory. A
server whose program is not installed is an error that names the install command, never a skip.
"""

from tests.kit.filesystem_broker import filesystem_settings
from tests.kit.mariadb import MariaDBServer
from tests.kit.pgbouncer import PgBouncerServer
from tests.kit.postgres import PostgresServer
from tests.kit.process import LocalProcess, ProcessFailed, is_alive
from tests.kit.producers import Producers
from tests.kit.proxy import TcpProxy
from tests.kit.rabbitmq import RabbitMQServer
from tests.kit.redis import RedisServer, ValkeyServer
from tests.kit.redis_groups import RedisCluster, RedisSentinels
from tests.kit.server import Server, ServerNotInstalled
from tests.kit.tls import TlsRedisServer
from tests.kit.waiting import eventually, quickest
from tests.kit.worker import Worker

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
    "ServerNotInstalled",
    "TcpProxy",
    "TlsRedisServer",
    "ValkeyServer",
    "Worker",
    "eventually",
    "filesystem_settings",
    "is_alive",
    "quickest",
]
