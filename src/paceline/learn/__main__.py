"""The process that gives a lesson: `python -m paceline.learn SETTINGS`, started by `Learner`.

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


def _follow_parent() -> None:
    with suppress(OSError, ValueError):
        sys.stdin.buffer.read()
    os._exit(1)


def main(text: str) -> None:
    """Give a lesson with these settings (`Learner._settings`), as JSON."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(19)
    settings: dict[str, Any] = json.loads(text)
    from paceline.learn.folder import Pupil
    from paceline.learn.lesson import job_for, teach
    from paceline.llm import load

    llm = load(settings["model"], drafter=None, progress=False, **settings["load"])
    job = job_for(settings["model"], llm.model.target.vocab_size, settings["disk"])
    teach(llm, Pupil(Path(settings["folder"])), settings["drafter"], job)


if __name__ == "__main__":
    main(sys.argv[1])
