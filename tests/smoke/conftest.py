"""The smoke tests use pytest-celery's components, and local processes in place of its containers.

With CELERY_UNIQUE_SMOKE=docker they run in Docker instead, as pytest-celery means them to: its
own Redis and RabbitMQ containers, and a worker image built from the Dockerfile beside this file.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery.result import AsyncResult
from pytest_celery import *  # noqa: F403 - its fixtures, for this directory alone
from pytest_celery import (
    ALL_CELERY_BROKERS,
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryWorkerContainer,
    RedisTestBackend,
)
from pytest_docker_tools import build

from tests.smoke import tasks, worker_app
from tests.smoke.local_containers import (
    LocalRabbitMQContainer,
    LocalRedisContainer,
    LocalWorkerContainer,
)
from tests.support import RabbitMQServer, RedisServer
from tests.support.worker import REPOSITORY


def pytest_itemcollected(item: pytest.Item) -> None:
    """pytest-celery asks for its servers at run time, where the collection does not see them."""
    item.add_marker("server")


@pytest.fixture(params=sorted(ALL_CELERY_BROKERS))
def celery_broker(request: pytest.FixtureRequest) -> Iterator[CeleryTestBroker]:
    """As in pytest-celery, whose set of brokers has another order in each test process."""
    broker: CeleryTestBroker = request.getfixturevalue(request.param)
    yield broker
    broker.teardown()


class ResultsByType(RedisTestBackend):
    """As pytest-celery's, which asks every object of the process by ``isinstance`` whether it is
    a result. Django, which other tests import, has objects that answer only once it is set up."""

    def teardown(self) -> None:
        gc.collect()
        for each in gc.get_objects():
            if issubclass(type(each), AsyncResult):
                each.backend = None  # its server goes first
        CeleryTestBackend.teardown(self)


@pytest.fixture
def celery_redis_backend(default_redis_backend: Any) -> Iterator[RedisTestBackend]:
    backend = ResultsByType(default_redis_backend)
    yield backend
    backend.teardown()


@pytest.fixture
def default_worker_tasks(
    default_worker_container_cls: type[CeleryWorkerContainer],
) -> set[ModuleType]:
    return {*default_worker_container_cls.tasks_modules(), tasks}


@pytest.fixture
def default_worker_app_module() -> ModuleType:
    return worker_app


if os.environ.get("CELERY_UNIQUE_SMOKE") == "docker":
    celery_base_worker_image = build(
        path=str(REPOSITORY),
        dockerfile="tests/smoke/Dockerfile",
        tag="celery-unique/smoke-worker",
    )
else:

    @pytest.fixture
    def default_redis_broker(start_server: Callable[..., Any]) -> LocalRedisContainer:
        return LocalRedisContainer("redis-broker", start_server(RedisServer))

    @pytest.fixture
    def default_redis_backend(start_server: Callable[..., Any]) -> LocalRedisContainer:
        return LocalRedisContainer("redis-backend", start_server(RedisServer))

    @pytest.fixture
    def default_rabbitmq_broker(rabbitmq_server: RabbitMQServer) -> LocalRabbitMQContainer:
        return LocalRabbitMQContainer("rabbitmq-broker", rabbitmq_server)

    @pytest.fixture
    def default_worker_container(
        tmp_path: Path,
        default_worker_initial_content: Mapping[str, bytes],
        default_worker_env: Mapping[str, str],
        default_worker_command: Sequence[str],
    ) -> Iterator[CeleryWorkerContainer]:
        container = LocalWorkerContainer(
            tmp_path,
            content=default_worker_initial_content,
            environment=default_worker_env,
            command=default_worker_command,
        )
        assert container.ready()
        yield container
        container.teardown()
