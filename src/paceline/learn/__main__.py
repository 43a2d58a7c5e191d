"""The process that trains a head: `python -m paceline.learn SETTINGS`, started by `Learner`.

It ends when its standard input ends, so that it does not outlive the server.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.kernels.torch_variables import RUNNING, TRAINING, set_unless_given


def _follow_parent() -> None:
    # sys.stdin would keep its lock, which Python waits for when the process ends.
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(1)


def _be_nice() -> None:
    """Take the lowest priority, also for the session, because Linux may divide the CPU between sessions first."""
    if hasattr(os, "nice"):
        os.nice(19)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")


def main(text: str) -> None:
    """Run one training run with these settings (`Learner._settings`), as JSON."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    _be_nice()
    set_unless_given({**RUNNING, **TRAINING})
    settings: dict[str, Any] = json.loads(text)
    from paceline.learn.folder import KeyFolder
    from paceline.learn.training import train_job, train_on_traffic
    from paceline.llm import load

    llm = load(settings["model"], drafter=None, progress=False, **settings["load"])
    job = train_job(settings["model"], llm.model.target.vocab_size, settings["disk"])
    train_on_traffic(llm, KeyFolder(Path(settings["folder"])), settings["drafter"], job)


if __name__ == "__main__":
    main(sys.argv[1])
