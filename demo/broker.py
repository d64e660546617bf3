"""kombu's broker of files, with messages that appear whole.

kombu 5.7 creates the file of a message and then writes it; a worker that looks in between takes
an empty message, and it is lost. Here it is written elsewhere and moved into place.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, filesystem
from kombu.utils.json import dumps
from kombu.utils.uuid import uuid


class Channel(filesystem.Channel):
    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:
        folder = Path(self.data_folder_out)
        name = uuid()
        unfinished = folder / f".{name}"
        unfinished.write_text(dumps(payload))
        unfinished.rename(folder / f"{os.times().elapsed * 1000:.0f}_{name}.{queue}.msg")


class Transport(filesystem.Transport):
    Channel = Channel


TRANSPORT_ALIASES["filesystem"] = f"{__name__}:Transport"
