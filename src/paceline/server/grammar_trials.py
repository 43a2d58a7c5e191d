"""Clients' grammars, tried out in the helper process before they are compiled here.

A grammar of a few bytes may take minutes and gigabytes to compile, and a thread that compiles cannot be stopped. So
each new one is compiled in a fork with limits first, and only one that stays within them by the server itself.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from threading import Lock

from paceline.errors import InvalidOption, PacelineError
from paceline.llm import LLM
from paceline.sampling.grammar_cache import Kind, check_installed, live_bytes, refused, spelled
from paceline.server.worker import Busy
from paceline.text.sandbox import SANDBOX, JobFailed, OverLimit, Unfinished

SECONDS, MEMORY = 2.0, 128 * 2**20
"""Limits of compiling a grammar: processor time and bytes."""
_LIVE = 2**30
"""Bytes of compiled grammars at most, those that replies are being written by included."""
_REMEMBERED = 1024


class Trials:
    """Tries out grammars for one model, and remembers how that went."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._key = llm, llm.tokenizer.digest
        self._known: OrderedDict[bytes, int | PacelineError] = OrderedDict()
        self._lock = Lock()

    def size(self, kind: Kind, text: str) -> int:
        """Return the bytes that the grammar takes once it is compiled.

        Blocks for some seconds at most. Raises `InvalidOption` for a grammar that is malformed or takes too much, and
        `Busy` where there is no time or memory for it now.
        """
        check_installed()
        name = hashlib.blake2b(f"{kind}\0{text}".encode()).digest()
        with self._lock:
            found = self._known.get(name)
        if found is None:
            found = self._try(kind, text)
            with self._lock:
                self._known[name] = found
                while len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        if isinstance(found, PacelineError):
            raise type(found)(found.cause, found.fix)
        if live_bytes() + found > _LIVE:
            raise Busy("grammars of other requests fill the memory there is for them", "Ask again in a moment")
        return found

    def _try(self, kind: Kind, text: str) -> int | PacelineError:
        model = self._llm.model
        ends = frozenset(model.eos)
        if not ends:
            return InvalidOption("a grammar ends with an end-of-sequence token, and the model has none")
        size = model.target.vocab_size
        about = (self._key, kind, text, False)
        try:
            SANDBOX.prepare(
                self._key,
                "paceline.sampling.grammar_compile:prepare",
                lambda: (self._key, *spelled(model.tokenizer, size, ends), sorted(ends)),
            )
            return int(SANDBOX.run("paceline.sampling.grammar_compile:measure", about, SECONDS, MEMORY, self._key))
        except JobFailed as error:
            return refused(kind, f"{error}")
        except OverLimit:  # not remembered: it may have been ended for another reason
            raise refused(kind, f"compiling it takes more than {SECONDS:g} s or {MEMORY >> 20} MiB") from None
        except Unfinished:
            raise Busy("the machine is too busy to compile a new grammar", "Ask again in a moment") from None
