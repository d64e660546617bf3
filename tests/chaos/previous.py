"""The release before this one, out of the history of this repository.

It is played beside this one: callers and workers of both, on the same broker and store. The app of
the run is this commit's, so its tasks may only use what both releases have.
"""

from __future__ import annotations

import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

from tests.support.worker import REPOSITORY

#: The commit that is played as the previous release. ``make chaos PREVIOUS=v1.0`` plays another.
PREVIOUS = "2dc4fdc1be23b0782aeb15d2d9bf40b754054529"


def previous_release(revision: str, directory: Path) -> Path:
    """The package of a commit, unpacked: the directory to start its processes in."""
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), "archive", revision, "celery_unique"],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"Commit {revision} of the previous release cannot be read from the history of "
            f"{REPOSITORY}: {done.stderr.decode().strip()}. A shallow clone lacks it: run "
            "git fetch --unshallow, or choose another one (make chaos PREVIOUS=COMMIT)"
        )
    tree = directory / f"release-{revision[:12]}"
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(tree, filter="data")
    return tree
