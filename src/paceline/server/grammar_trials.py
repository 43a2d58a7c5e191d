"""Trial compilation of clients' grammars in the sandbox, before they are compiled here.

A grammar of a few bytes may take minutes and gigabytes to compile, and a thread that compiles cannot be stopped. So
each new grammar is first compiled in a fork with limits, and by the server itself only if it stays within them.
"""

from __future__ import annotations

import hashlib

from paceline.errors import InvalidOption, PacelineError
from paceline.llm import LLM
from paceline.sampling.grammar_cache import Cache, Kind, check_installed, live_bytes, refused, spelled
from paceline.server.worker import Busy
from paceline.text.sandbox import SANDBOX, JobFailed, OverLimit, Unfinished

SECONDS, MEMORY = 2.0, 128 * 2**20
"""Limits for compiling a grammar: processor time and bytes."""
_MAX_LIVE = 2**30
"""Bytes of all compiled grammars, including those that running replies use."""
_MAX_RESULTS = 1024


class GrammarTrials:
    """Trial compilation for one model. Results are cached."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._key = llm, llm.tokenizer.digest
        self._results: Cache[bytes, int | PacelineError] = Cache(_MAX_RESULTS)

    def size(self, kind: Kind, text: str) -> int:
        """Return the bytes that the compiled grammar takes.

        Blocks for some seconds at most. Raises `InvalidOption` for a grammar that is malformed or exceeds the limits,
        and `Busy` if there is no time or memory for it now.
        """
        check_installed()
        digest = hashlib.blake2b(f"{kind}\0{text}".encode()).digest()
        result = self._results.get(digest, lambda: (self._compile(kind, text), 1))
        if isinstance(result, PacelineError):
            raise type(result)(result.cause, result.fix)
        if live_bytes() + result > _MAX_LIVE:
            raise Busy("grammars of other requests use all the memory for grammars")
        return result

    def _compile(self, kind: Kind, text: str) -> int | PacelineError:
        model = self._llm.model
        ends = frozenset(model.eos)
        if not ends:
            return InvalidOption("a grammar requires an end-of-sequence token, which the model does not have")
        size = model.target.vocab_size
        job = (self._key, kind, text, False)
        try:
            SANDBOX.prepare(
                self._key,
                "paceline.sampling.grammar_compile:prepare",
                lambda: (self._key, *spelled(model.tokenizer, size, ends), sorted(ends)),
            )
            return int(SANDBOX.run("paceline.sampling.grammar_compile:measure", job, SECONDS, MEMORY, self._key))
        except JobFailed as error:
            return refused(kind, f"{error}")
        except OverLimit:  # not cached: the fork may have been killed for another reason
            raise refused(kind, f"compiling it takes more than {SECONDS:g} s or {MEMORY >> 20} MiB") from None
        except Unfinished:
            raise Busy("the machine is too busy to compile a new grammar") from None
