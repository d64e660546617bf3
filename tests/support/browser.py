"""A headless Chromium, to see what a person would see."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.server import find_program

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

#: What tests leave for people to look at; not under version control.
SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"

_FLAGS = (
    "--headless=new",
    # The sandbox refuses to run as root, and a container's /dev/shm can be too small.
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    # Pages are served on this machine: nothing else is to be looked for on the network.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,800",
)


@contextmanager
def chromium() -> Iterator[Chrome]:
    """A selenium WebDriver for Debian's Chromium, with an empty profile of its own."""
    install = "apt-get install chromium chromium-driver"
    program = find_program("chromium", install_command=install)
    driver_program = find_program("chromedriver", install_command=install)

    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = program
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = Chrome(options=options, service=ChromeService(driver_program))
        driver.set_page_load_timeout(60)
        try:
            yield driver
        finally:
            driver.quit()


def _saved(driver: Chrome, path: Path) -> bool:
    """The driver gives up a screenshot that a navigation overtakes, such as that of a form."""
    from selenium.common.exceptions import TimeoutException

    for _ in range(4):
        try:
            return driver.save_screenshot(str(path))
        except TimeoutException as error:
            if "aborted by navigation" not in str(error):
                raise
    return driver.save_screenshot(str(path))


def keep_screenshot(driver: Chrome, name: str) -> Path:
    """Write what the browser shows to ``build/screenshots/NAME.png``."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"{name}.png"
    if not _saved(driver, path):
        raise OSError(f"the browser could not write {path}")
    return path
