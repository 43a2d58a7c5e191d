"""The engine, which runs requests in rounds: plan, draft, forward, accept, commit, emit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import cached_property, partial, wraps
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar
from weakref import finalize, ref

from torch import Tensor

from paceline.drafters.base import Drafter
from paceline.engine.detokenizer import Chunk, TextStream, TrimmedVerdict
from paceline.engine.draft_policy import DraftPolicies, Speculation
from paceline.engine.drafting import learn, plan_round, propose, taps
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.prefix_file import CachedText
from paceline.engine.prefix_key import drafter_key, target_key
from paceline.engine.prefix_store import PrefixStore
from paceline.engine.request import Request, accept
from paceline.engine.self_check import chunk_invariant, guarantee
from paceline.engine.stats import Clock, Stats, Timer
from paceline.errors import OutOfMemory, memory_named
from paceline.protocols import KVCache, Measurable, Target
from paceline.sampling.sampler import Sampler
from paceline.types import Draft, DraftBudget, Forward, Guarantee, Rows, Tap, Want
from paceline.verify.tree import PREFILL_ROWS, chunk_end, pack, pack_prefix
from paceline.vision.prompt import ImagePrompt

_log = logging.getLogger("paceline.engine")

_LAST = 10.0
"""Maximum number of seconds to write the prefix cache to its folder, when the cache is deleted or the process ends."""

Method = TypeVar("Method", bound=Callable[..., Any])
Result = TypeVar("Result")


def _exclusive(method: Method) -> Method:
    """Let only one thread at a time run a method. No other call may come between a pass and its commit.

    If requests are finished during the call, they are released after it.
    """

    @wraps(method)
    def run(self: Engine, *args: Any, **options: Any) -> Any:
        outermost = not self._lock._is_owned()  # type: ignore[attr-defined]
        with self._lock:
            depth = 0 if outermost else self._depth
            try:
                self._depth = depth + 1
                return method(self, *args, **options)
            except BaseException:
                # An error or interrupt may have left slots that no request holds.
                self._leaving |= {*range(len(self.cache.lengths))} - {*self._holders}
                self._release_slots()
                raise
            finally:
                self._depth = depth  # do not decrement: an interrupt may have come before the increment
                while self._finished and not depth:
                    self.finish(self._finished.pop())

    return run  # type: ignore[return-value]


class Engine:
    """Runs requests on a target, with its cache and its drafters. It is thread-safe: the rounds of several threads take
    turns."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | Mapping[str, Drafter] | None = None,
        draft: DraftBudget | None = None,
        timer: Timer = time.perf_counter,
    ) -> None:
        """Make an engine.

        Args:
            target: The target.
            drafter: A drafter, or several drafters by name. The first one is the default.
            draft: Budget of each draft. None lets a controller choose the budget, up to the drafter's own maximum.
            timer: A function that returns the time in seconds, to measure rounds.
        """
        self.target, self._timer = target, timer
        self.policies = DraftPolicies(drafter, draft)
        self.cache: KVCache = target.new_cache()
        for policy in self.policies:
            policy.drafter.bind(self.cache)
        self.prefixes: PrefixCache | None = None
        """The prefix cache, if `remember` was called."""
        self._lock, self._depth = RLock(), 0
        self._finished: list[Request] = []
        self._holders: dict[int, ref[Request]] = {}
        """Slot -> the active request that holds it. The reference is weak, because after an interrupt a request may
        never be finished."""
        self._leaving: set[int] = set()
        """Slots that must be released. If an interrupt stops a release, the next `_release_slots` repeats it."""

    @cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee for text with speculation on this machine (see `self_check.guarantee`)."""
        return guarantee(self.target)

    @cached_property
    def chunk_invariant(self) -> bool:
        """True if no bit changes when a prompt is cut into pieces, or continues from another text (see
        `self_check.chunk_invariant`)."""
        return chunk_invariant(self.target, self.guarantee)

    def remember(self, limit: int, folder: Path | None = None, disk: int = 0, lazy: bool = False) -> None:
        """Set the size of the prefix cache.

        Args:
            limit: Maximum memory, in bytes. 0 disables the cache.
            folder: Folder for texts that do not fit into memory or that should outlive the process. None keeps the
                folder of an earlier call, if there was one.
            disk: Maximum size of the folder, in bytes.
            lazy: True to check `chunk_invariant` only once a prompt could continue from a text in memory. False to
                check it now.

        Raises:
            InvalidOption: If the folder cannot be used.
        """
        if not limit:
            self.prefixes = None
            return
        store = None if self.prefixes is None else self.prefixes.disk
        if folder:
            target, drafters = self.target, {policy.name: policy.drafter for policy in self.policies}
            keyed = {name: (drafter_key(drafter, target), drafter) for name, drafter in drafters.items()}
            store = PrefixStore(folder, disk, target_key(target), self.cache, keyed)
        now = store or not lazy
        self.prefixes = PrefixCache(limit, self.chunk_invariant if now else partial(_check, ref(self)), store)
        if store:
            # `finalize` must not hold a reference to the cache itself. So a shallow copy, which shares the texts,
            # writes them when the cache is deleted or the process ends.
            finalize(self.prefixes, copy(self.prefixes).flush, _LAST)

    @_exclusive
    def save_prefixes(self, seconds: float) -> None:
        """Write the prefix cache to its folder, if it has one, in at most `seconds`."""
        if self.prefixes is not None:
            self.prefixes.flush(seconds)

    @_exclusive
    def write_prefixes(self) -> list[CachedText]:
        """Start writing the texts that the prefix cache's folder lacks, in the background. Return these texts."""
        return self.prefixes.write() if self.prefixes is not None else []

    @_exclusive
    def kept_tokens(self) -> int:
        """Return the total number of tokens of the texts in the prefix cache's folder, or 0 if there is no folder."""
        return self.prefixes.kept_tokens() if self.prefixes is not None else 0

    @_exclusive
    def start(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        stream: TextStream,
        stats: Stats,
        source: Request | None = None,
        speculation: Speculation | None = None,
        adapter: int = 0,
    ) -> Request:
        """Start a request. The caller must eventually call `finish`, even after an error.

        Args:
            prompt: Token ids of the prompt. There must be at least one.
            sampler: Chooses the reply's tokens.
            stream: Converts the reply's tokens to text.
            stats: Statistics of the reply.
            source: A request with the same prompt that has already been prefilled. Its state is copied if possible.
            speculation: The drafter and the maximum draft. None for the default.
            adapter: See `KVCache.acquire`.

        Returns:
            The request, which holds a slot.

        Raises:
            OutOfMemory: If there is no memory for a slot.
            InvalidOption: If the drafter is unknown.
        """
        speculation = speculation or self.policies.default
        policy = self.policies[speculation.drafter]
        replied = source is not None and len(source.token_ids) > source.num_prompt_tokens
        if source and source.adapter != adapter:
            source = None
        # A drafter that reads hidden states can copy its state only from a request with the same drafter, and only
        # before that request's first round. Later, its state also covers tokens of the reply.
        if source and policy and policy.drafter.taps and (replied or source.policy is not policy):
            source = None
        self._release_slots()
        images = prompt if isinstance(prompt, ImagePrompt) else None
        lag = images.lag if images else 0
        acquire = partial(self.cache.acquire, len(prompt), adapter, lag)
        slot = self._with_memory(partial(self.cache.fork, source.slot) if source else acquire)
        request = Request(list(prompt), len(prompt), sampler, stream, stats, slot, policy, speculation.max_draft)
        request.adapter, request.images = adapter, images
        with self._holding(request):
            if source:
                self.cache.truncate(slot, request.position)
            if policy and source and source.policy is policy and not replied:
                policy.drafter.fork(slot, source.slot, request.ids_with_images)
            elif policy:
                policy.drafter.admit(slot, request.ids_with_images)
        return request

    @_exclusive
    def suspend(self, request: Request) -> None:
        """Release the request's slot for now. The request keeps its text, and can continue after `resume`."""
        self._release(request)

    @_exclusive
    def resume(self, request: Request) -> None:
        """Acquire a slot for a suspended request. The caller must then prefill the whole text."""
        lag = request.images.lag if request.images else 0
        acquire = partial(self.cache.acquire, request.num_prompt_tokens, request.adapter, lag)
        request.slot = self._with_memory(acquire)
        request.active, request.resumed, request.num_seen_tokens = True, True, 0
        with self._holding(request):
            if request.policy:
                request.policy.drafter.admit(request.slot, request.ids_with_images)

    def prefill(self, request: Request) -> None:
        """Feed the prompt, except its last token, which becomes row 0 of the first round."""
        while self.feed(request):
            pass

    @_exclusive
    def feed(self, request: Request, limit: int = PREFILL_ROWS) -> int:
        """Feed the next piece of the prompt: a chunk of `PREFILL_ROWS` tokens, or a part of one.

        Args:
            request: The request.
            limit: Maximum number of tokens. It is ignored if cutting the prompt would change bits (see
                `chunk_invariant`).

        Returns:
            The number of tokens fed, or 0 if no token is left to feed.

        Raises:
            OutOfMemory: If there is no memory for the pass.
        """
        clock = Clock(self._timer)
        reader = request.prompt_reader
        done = self.cache.lengths[request.slot]
        if not done and not reader:
            done = self._load_prefix(request)
        limit = PREFILL_ROWS if limit < PREFILL_ROWS and not self.chunk_invariant else limit
        end, images = min(chunk_end(done, limit), request.position), request.images
        piece = request.token_ids[done : images.chunk_end(done, end) if images else end]
        if piece:
            rows = pack_prefix(piece, request.slot, done, self.target.device)
            if images:
                rows = replace(rows, given=images.given(done, done + len(piece)))
            want = reader.want if reader else Want("none")
            out = self._forward(rows, Want(want.logits, taps=tuple(dict.fromkeys((*taps([request]), *want.taps)))))
            self.cache.commit(rows, [range(1, len(piece))])  # a path does not contain row 0, which is always kept
            if request.policy:
                states = {tap: x[0, : len(piece)] for tap, x in out.taps.items()}
                request.policy.drafter.feed(request.slot, piece, states)
            if reader:
                reader.read(done, request.token_ids[done + 1 : done + 1 + len(piece)], out)
            if done + len(piece) == request.position:
                self._save_prefix(request)
        clock.lap("prefill")
        _charge([request], clock)
        return len(piece)

    def _load_prefix(self, request: Request) -> int:
        """Load the longest cached prefix of the text, and return its length in tokens."""
        if self.prefixes is None:
            return 0
        policy = request.policy
        needs = policy.name if policy and policy.drafter.needs_past else None
        ids = request.cache_ids
        hit = self.prefixes.find(ids, needs, request.adapter)
        known = hit.length if hit else 0
        if not request.resumed:
            request.stats.diverged = self.prefixes.divergence(ids, request.adapter, known)
        if hit is None:
            return 0
        length = request.images.without_partial_image(hit.length) if request.images else hit.length
        known = self.cache.load(request.slot, hit.target, length)
        # The cache may load nothing, because a resumed text keeps the rotary factors of its original prompt length.
        if policy and known and (saved := hit.drafters.get(policy.name)):
            policy.drafter.load(request.slot, saved, known)
        if not request.resumed:  # a resumed request finds its own text, which does not count as a hit
            request.stats.cached = known
            request.stats.from_disk = known if hit.from_disk else 0
        return known

    def _save_prefix(self, request: Request) -> None:
        """Save the state of the text in the prefix cache, if possible. Failed requests and requests for embeddings are
        skipped.

        The cache only saves time, so an error here, for example in a drafter, must not make the reply fail.
        """
        reader = request.prompt_reader
        if self.prefixes is None or request.error or (reader and reader.want.logits == "none"):
            return
        length, target, room = self.cache.lengths[request.slot], self.target, self.prefixes.limit
        if not self.prefixes.disk and isinstance(target, Measurable) and target.cache_bytes(length) > room:
            return  # copying the text would take memory, only to drop the copy
        policy = request.policy
        try:
            with suppress(OutOfMemory), memory_named("no memory to keep a text", "Keep fewer"):
                saved = {policy.name: policy.drafter.save(request.slot)} if policy else {}
                state = self.cache.save(request.slot)
                tokens = request.cache_ids[: state.length + 1]
                prompt = min(request.num_prompt_tokens, len(tokens))
                self.prefixes.store(tokens, prompt, state, saved, request.adapter)
        except Exception:
            _log.exception("failed to save a text in the prefix cache")

    @_exclusive
    def step(self, requests: Sequence[Request]) -> list[list[Chunk]]:
        """Run one round for these requests.

        If this raises an error, no request has changed, and the round can be repeated. An error after the cache commit
        is not raised, but ends the requests.

        Returns:
            The new chunks of each request.

        Raises:
            OutOfMemory: If there is no memory for the pass.
        """
        clock = Clock(self._timer)
        plan = plan_round(requests, self.cache)
        drafted = propose(plan, self.target.vocab_size, self._timer)
        clock.lap("draft")
        pending, slots = [one.token_ids[-1] for one in requests], [one.slot for one in requests]
        rows = pack(pending, drafted.drafts, slots, [one.position for one in requests], self.target.device)
        out = self._forward(rows, Want("all", taps=taps(requests)))
        verdicts = [accept(*one) for one in zip(requests, drafted.drafts, out.logits, strict=True)]
        clock.lap("verify")
        self.cache.commit(rows, [None if verdict.error else verdict.path for verdict in verdicts])
        try:
            for i, (request, draft, verdict) in enumerate(zip(requests, drafted.drafts, verdicts, strict=True)):
                self._advance(request, draft, verdict, {tap: states[i] for tap, states in out.taps.items()})
            clock.lap("commit")
            _charge(requests, clock)
            learn(plan, requests, drafted, verdicts, clock.laps["verify"] + clock.laps["commit"])
        except Exception as error:  # the round has been committed, so it must not be repeated
            for request in requests:
                request.fail(request.error or error)
        return [request.stream.emit(verdict) for request, verdict in zip(requests, verdicts, strict=True)]

    def finish(self, request: Request) -> None:
        """End a request and release its slot.

        If this is called during a pass, for example because a callback closes a stream, the slot is released after the
        pass.
        """
        with self._lock:
            if self._depth:
                self._finished.append(request)
                return
            request.finish = request.finish or "cancelled"
            try:
                self._release(request)
            finally:
                told, request.on_finish = request.on_finish, None
                if told:
                    told(request)

    def _release(self, request: Request, save: bool = True) -> None:
        """Release a request's slot, if it holds one. `save`: True to keep its text in the prefix cache."""
        if not request.active:
            return
        try:
            # Also keep a prompt that has been read only partly, because its client may send it again. Skip requests
            # that were interrupted between the cache commit and the token update.
            if save and 0 < self.cache.lengths[request.slot] <= request.position + 1:
                self._save_prefix(request)
        finally:
            self._leaving.add(request.slot)
            request.active = False
            self._holders.pop(request.slot, None)
            self._release_slots()

    def _release_slots(self) -> None:
        """Release the slots in `_leaving`."""
        for slot in self._leaving - {*self._holders}:
            try:
                for policy in self.policies:
                    policy.drafter.release(slot)
            finally:
                self.cache.release(slot)
            self._leaving.discard(slot)

    @contextmanager
    def _holding(self, request: Request) -> Iterator[None]:
        """Record that a request holds its slot. If the block raises an error, release the slot, and do not save its
        text."""
        self._holders[request.slot] = ref(request, partial(_release_deleted, ref(self), request.slot))
        try:
            yield
        except BaseException:
            self._release(request, save=False)
            raise

    @staticmethod
    def _advance(request: Request, draft: Draft, verdict: TrimmedVerdict, states: Mapping[Tap, Tensor]) -> None:
        """Advance a request and its drafter by a verdict that the cache has committed.

        `states`: Taps of the request's rows, each [T, H].
        """
        request.stats.count(draft, verdict)
        request.stats.draft_failures = request.sampler.draft_failures
        if verdict.error:
            request.fail(verdict.error)
            return
        request.token_ids.extend(verdict.tokens)
        request.finish = verdict.finish
        if request.prediction:
            request.prediction.observe(draft, verdict.tokens)
            request.stats.confirmed = request.prediction.accepted
        if request.policy and not verdict.finish:
            try:
                request.policy.drafter.observe(request.slot, verdict, states)
            except Exception as error:  # the tokens have been committed, so they must still be returned
                request.fail(error)

    def _forward(self, rows: Rows, want: Want) -> Forward:
        cause = f"no memory on {self.target.device} for a pass of {rows.tokens.numel()} rows"

        def forward() -> Forward:
            with memory_named(cause, "Use a shorter prompt, a smaller draft or a smaller dtype"):
                return self.target.forward(rows, self.cache, want)

        return self._with_memory(forward)

    def _with_memory(self, action: Callable[[], Result]) -> Result:
        """Run an action that needs memory. If there is none, drop the cached texts, and try again."""
        try:
            return action()
        except OutOfMemory:
            if not (self.prefixes and self.prefixes.nbytes):
                raise
        self.prefixes.clear()  # active requests have priority over cached texts
        return action()


def _check(engine: ref[Engine]) -> bool:
    """Return `Engine.chunk_invariant`, or False if there is no memory for the check. This does not keep the engine in
    memory."""
    own = engine()
    assert own
    try:
        return own.chunk_invariant
    except OutOfMemory:
        return False


def _release_deleted(engine: ref[Engine], slot: int, request: ref[Request]) -> None:
    """Release the slot of a request that was deleted without `finish`. If a pass is running, release the slot later."""
    if (own := engine()) is not None:
        own._leaving.add(slot)
        del own._holders[slot]
        if own._lock.acquire(blocking=False):
            try:
                if not own._depth:
                    own._release_slots()
            finally:
                own._lock.release()


def _charge(requests: Sequence[Request], clock: Clock) -> None:
    """Add the time of a pass to the statistics of each request in it."""
    for request in requests:
        for phase, seconds in clock.laps.items():
            request.stats.seconds[phase] += seconds
