"""Sampling parameters of a reply, and their validation."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, get_args

from paceline.errors import InvalidOption
from paceline.sampling.dry import Breakers, Dry
from paceline.sampling.grammar import Grammar
from paceline.sampling.noise import Noise
from paceline.sampling.processors import (
    BadWords,
    CountPenalty,
    LogitBias,
    MinNewTokens,
    NoRepeatNGram,
    RepetitionPenalty,
    spellings,
)
from paceline.sampling.sampler import LogitsProcessor, RuleName, Sampler
from paceline.sampling.thinking import ThinkingBudget

if TYPE_CHECKING:
    from paceline.text.tokenizer import Tokenizer

RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size")
"""Parameters that a model's generation_config may recommend."""


def changed(sampling: Sampling, changes: Mapping[str, Any]) -> Sampling:
    """Return the sampling with changes of single parameters. Raises `InvalidOption` for one that does not exist."""
    known = [field.name for field in fields(Sampling)]
    for name in changes:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.5)
            fix = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}"
            raise InvalidOption(f"{name!r} is not a sampling parameter", fix)
    return replace(sampling, **changes) if changes else sampling


def recommended(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling that a generation_config recommends; empty if it does not sample."""
    own = {name: generation[name] for name in RECOMMENDED if generation.get(name) is not None}
    if not generation.get("do_sample", bool(own.get("temperature"))):
        return {}
    if own.get("top_k") == -1:  # vLLM's way to say "all"
        own["top_k"] = 0
    # transformers leaves its own default out of the file.
    return {"temperature": 1.0, **own}


StopWhen = Callable[[Sequence[int], str], bool]
"""(token ids of the reply so far, its text so far) -> whether the reply ends here."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's vocabulary, which some parameters need. `size`: number of tokens. `eos`: end-of-sequence tokens.
    `encode`: text -> token ids, without BOS or EOS."""

    size: int
    eos: Sequence[int] = ()
    encode: Callable[[str], list[int]] | None = None
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one reply. The default is greedy.

    max_new_tokens: maximum number of tokens of the reply, EOS included (>= 0).
    temperature: 0 is greedy; > 0 samples from softmax(logits / temperature).

    Applied to the logits before temperature, in this order, at every drafted token as at every other:
    repetition_penalty: > 1 makes tokens of prompt and reply less likely (0.01 to 1000; 1: off), as in transformers.
    frequency_penalty, presence_penalty: -2 to 2, subtracted for each occurrence in the reply, and once if there is any,
    as in OpenAI's API.
    logit_bias: token id -> number added to its logit; -inf bans the token.
    bad_words: banned sequences: strings (with and without a space before them) or sequences of token ids.
    dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers: DRY, as in llama.cpp. A
    token that would continue a repetition of n >= allowed_length tokens loses multiplier * base ** (n - allowed_length)
    (a multiplier of 0: off). Only the last penalty_last_n tokens of prompt and reply count (-1: all), and no repetition
    goes beyond a breaker, which is a text.
    no_repeat_ngram_size: no n-gram of this size occurs twice, prompt included (0: off).
    min_new_tokens: EOS and stop_token_ids cannot come before this many tokens. Stop strings and stop_when can.
    thinking_budget: maximum number of tokens of `reasoning`, after which its end is forced (None: no limit).
    processors: your own functions of (prefix, logits [V]) that return the logits to use. `prefix` is a
    `sampler.Prefix`. They are called for drafted tokens too; what they raise after drafted tokens ends the reply only
    if the reply gets there.
    grammar: the grammar of the reply (`Grammar`). Where it allows only EOS, EOS comes even before min_new_tokens.

    Truncation, in this order. top_n_sigma: keep logits within so many standard deviations of the highest (0: all).
    top_k: keep the k likeliest tokens (0: all). top_p: keep the likeliest tokens until their probabilities add up to p
    (1: all; 0: the likeliest alone). min_p: keep tokens at least min_p times as likely as the likeliest (0: all).
    typical_p: keep the tokens whose surprise is nearest to the expected one until their probabilities add up to p (1:
    all). xtc_probability, xtc_threshold: with this probability, decided anew for each token by seed and position, drop
    all tokens that are at least as likely as the threshold, but the least likely of them (0: off).

    rule: how drafted tokens are accepted: "match" (the default: the text is the same with any drafter or none),
    "rejection" and "block" (the distribution is the same), "typical" (lossy: neither is). See `verify/rules.py`.
    seed: -2**63 <= seed < 2**63, taken modulo 2**63; None draws one, and the statistics report it.
    stop: strings that end the reply; the text stops before them. stop_token_ids: tokens that do.
    reasoning: texts around reasoning at the beginning of the reply, where stop strings do not count, such as
    ("<think>", "</think>"). The first is "" if the prompt ends inside of the reasoning. (): no reasoning.
    stop_when: functions of (token ids of the reply so far, its text so far) that return True where the reply ends. They
    are called after every token, drafted or not, in order. When a round is repeated (after a failure), they may be
    called twice for the same token, so their results must depend on their arguments alone.
    ignore_eos: continue after the model's own end-of-sequence tokens.
    prediction: text or token ids that most of the reply is expected to be, such as a file to edit. It is drafted, and
    changes no text.
    logprobs: None, or the number of likeliest tokens to report with each token's log-probability (0: the token's
    alone); log-probabilities are those before all of the above.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: Sequence[str | Sequence[int]] = ()
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    thinking_budget: int | ThinkingBudget | None = None
    processors: Sequence[LogitsProcessor] = ()
    grammar: Grammar | None = None
    top_n_sigma: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    rule: RuleName = "match"
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    reasoning: Sequence[str] = ()
    stop_when: StopWhen | Sequence[StopWhen] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prediction: str | Sequence[int] = ""

    def __post_init__(self) -> None:
        for name, (kind, low, high) in _RANGES.items():
            if (value := getattr(self, name)) is not None or name not in ("seed", "logprobs"):
                _check_number(name, value, kind, low, high)
        if self.seed is not None:
            object.__setattr__(self, "seed", self.seed % 2**63)
        if self.typical_p == 0.0:
            raise InvalidOption("typical_p must be > 0, got 0", "Give a number up to 1; 1 is off")
        if 0.0 < self.temperature < 1e-3:
            raise InvalidOption(f"temperature={self.temperature} is too small to divide by", "Give 0 for greedy text")
        if self.rule not in get_args(RuleName):
            raise InvalidOption(f"rule={self.rule!r} is unknown", f"Give one of {', '.join(get_args(RuleName))}")
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidOption(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens", "Give less")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidOption(
                f"grammar={self.grammar!r} is no grammar", "Give Grammar.json_schema(...), for instance"
            )
        if self.grammar and self.ignore_eos:
            raise InvalidOption("a grammar ends with EOS, which ignore_eos would ignore", "Leave out one of them")
        if not isinstance(self.prediction, str):
            object.__setattr__(self, "prediction", _ids("prediction", self.prediction))
        for name, value in (
            ("stop", _strings("stop", self.stop)),
            ("dry_sequence_breakers", _strings("dry_sequence_breakers", self.dry_sequence_breakers)),
            ("reasoning", _reasoning(self.reasoning)),
            ("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids)),
            ("stop_when", _functions("stop_when", self.stop_when)),
            ("processors", _functions("processors", self.processors)),
            ("bad_words", _words(self.bad_words)),
            ("logit_bias", _bias(self.logit_bias)),
        ):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "thinking_budget", _budget(self.thinking_budget, self.reasoning))

    def seeded(self) -> Sampling:
        """Return the same with a seed: a fresh one if there is none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))

    def sampler(self, sample: int = 0, vocabulary: Vocabulary | None = None) -> Sampler:
        """Return the sampler of one reply; draws the seed if there is none. `sample` numbers several replies to
        one prompt. Raises `InvalidOption` for tokens that the `vocabulary` does not have; None skips the check."""
        seed = self.seeded().seed
        assert seed is not None
        return Sampler(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            top_n_sigma=self.top_n_sigma,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            noise=Noise(seed, sample),
            processors=self._processors(vocabulary),
            rule=self.rule,
        )

    def _processors(self, vocabulary: Vocabulary | None) -> tuple[LogitsProcessor, ...]:
        """Return fresh processors, in their order."""
        words = self._sequences(vocabulary)
        ends = {*self.stop_token_ids, *(vocabulary.eos if vocabulary and not self.ignore_eos else ())}
        if vocabulary:
            self._check(vocabulary, words)
        own: list[tuple[object, Callable[[], LogitsProcessor]]] = [
            (self.repetition_penalty != 1.0, lambda: RepetitionPenalty(self.repetition_penalty)),
            (
                self.frequency_penalty or self.presence_penalty,
                lambda: CountPenalty(self.frequency_penalty, self.presence_penalty),
            ),
            (self.dry_multiplier and self.dry_penalty_last_n, lambda: self._dry(vocabulary)),
            (self.logit_bias, lambda: LogitBias(self.logit_bias)),
            (words, lambda: BadWords(words)),
            (self.no_repeat_ngram_size, lambda: NoRepeatNGram(self.no_repeat_ngram_size)),
            (self.min_new_tokens and ends and not self.grammar, lambda: MinNewTokens(self.min_new_tokens, ends)),
            (self.thinking_budget is not None, lambda: self._thinking_limit(vocabulary)),
        ]
        # The grammar comes last: no processor may allow what it forbids.
        last = (self._matcher(self.grammar, vocabulary, ends),) if self.grammar else ()
        return (*(make() for wanted, make in own if wanted), *self.processors, *last)

    def _dry(self, vocabulary: Vocabulary | None) -> LogitsProcessor:
        texts, breakers = tuple(self.dry_sequence_breakers), Breakers()
        if texts:
            breakers = Breakers.of(texts, _tokenizer(vocabulary, "dry_sequence_breakers"))
        return Dry(self.dry_multiplier, self.dry_base, self.dry_allowed_length, self.dry_penalty_last_n, breakers)

    def _thinking_limit(self, vocabulary: Vocabulary | None) -> LogitsProcessor:
        assert isinstance(self.thinking_budget, ThinkingBudget)
        return self.thinking_budget.limit(_tokenizer(vocabulary, "a thinking_budget"))

    def _matcher(self, grammar: Grammar, vocabulary: Vocabulary | None, ends: set[int]) -> LogitsProcessor:
        tokenizer = _tokenizer(vocabulary, "a grammar")
        assert vocabulary is not None
        # A stop token that is text may stand inside the grammar's text.
        over = {token for token in self.stop_token_ids if token not in tokenizer.token_bytes}
        return grammar.matcher(tokenizer, vocabulary.size, vocabulary.eos, self.min_new_tokens, ends, over)

    def _sequences(self, vocabulary: Vocabulary | None) -> set[tuple[int, ...]]:
        """Return bad words as token ids."""
        found: set[tuple[int, ...]] = set()
        for word in self.bad_words:
            if not isinstance(word, str):
                found.add(tuple(word))
                continue
            if vocabulary is None or vocabulary.encode is None:
                raise InvalidOption(f"bad_words holds {word!r} and there is no tokenizer", "Give token ids")
            spelled = spellings(word, vocabulary.encode)
            if not spelled:
                raise InvalidOption(f"bad_words holds {word!r}, of which the tokenizer makes nothing")
            found |= spelled
        return found

    def _check(self, vocabulary: Vocabulary, words: set[tuple[int, ...]]) -> None:
        named = {
            "logit_bias": self.logit_bias,
            "bad_words": {token for word in words for token in word},
            "stop_token_ids": self.stop_token_ids,
            "prediction": () if isinstance(self.prediction, str) else self.prediction,
        }
        for name, tokens in named.items():
            if wrong := [token for token in tokens if token >= vocabulary.size]:
                raise InvalidOption(
                    f"{name} holds {wrong[0]}, which is no token of the model", f"Ids go to {vocabulary.size - 1}"
                )
        if (self.logprobs or 0) > vocabulary.size:
            raise InvalidOption(f"logprobs={self.logprobs} is more than the model's {vocabulary.size} tokens")


def _tokenizer(vocabulary: Vocabulary | None, what: str) -> Tokenizer:
    if vocabulary is None or vocabulary.tokenizer is None:
        raise InvalidOption(f"there is {what} and no tokenizer", "Generate with an LLM, which has one")
    return vocabulary.tokenizer


_RANGES: dict[str, tuple[type[float], float, float]] = {
    "max_new_tokens": (int, 0, 2**31),
    "temperature": (float, 0.0, 1000.0),
    "repetition_penalty": (float, 0.01, 1000.0),  # logits are divided by it
    "frequency_penalty": (float, -2.0, 2.0),
    "presence_penalty": (float, -2.0, 2.0),
    "dry_multiplier": (float, 0.0, 1000.0),
    "dry_base": (float, 1.0, 1000.0),
    "dry_allowed_length": (int, 0, 2**31),
    "dry_penalty_last_n": (int, -1, 2**31),
    "no_repeat_ngram_size": (int, 0, 2**31),
    "min_new_tokens": (int, 0, 2**31),
    "top_n_sigma": (float, 0.0, 1000.0),
    "top_k": (int, 0, 2**31),
    "top_p": (float, 0.0, 1.0),
    "min_p": (float, 0.0, 1.0),
    "typical_p": (float, 0.0, 1.0),
    "xtc_probability": (float, 0.0, 1.0),
    "xtc_threshold": (float, 0.0, 1.0),
    "seed": (int, -(2**63), 2**63 - 1),
    "logprobs": (int, 0, 2**31),
}


def _check_number(name: str, value: object, kind: type[float], low: float, high: float) -> None:
    """Check a number. `kind`: int, or float, which takes both."""
    noun, limits = ("whole number", f"{low} to {high}") if kind is int else ("number", f"{low:g} to {high:g}")
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise InvalidOption(f"{name} must be a {noun}, got {value!r}", f"Give one from {limits}")
    if not low <= value <= high:
        raise InvalidOption(f"{name}={value!r} is out of range", f"Give a {noun} from {limits}")


def _strings(name: str, texts: Any) -> tuple[str, ...]:
    found = (texts,) if isinstance(texts, str) else _listed(name, texts)
    if any(not isinstance(text, str) or not text for text in found):
        raise InvalidOption(f"{name}={texts!r} holds something that is not a non-empty string")
    return found


def _budget(budget: Any, reasoning: Sequence[str]) -> ThinkingBudget | None:
    if budget is None:
        return None
    tokens = budget.tokens if isinstance(budget, ThinkingBudget) else budget
    _check_number("thinking_budget", tokens, int, 0, 2**31)
    if isinstance(budget, ThinkingBudget):
        return budget
    if not reasoning:
        raise InvalidOption(
            "thinking_budget requires reasoning, the texts around it", 'Give reasoning=("<think>", "</think>") too'
        )
    return ThinkingBudget(budget, *reasoning)


def _reasoning(markers: Any) -> tuple[str, ...]:
    found = _listed("reasoning", markers)
    if found and (len(found) != 2 or any(not isinstance(s, str) for s in found) or not found[1]):
        raise InvalidOption(
            f"reasoning={markers!r} is not a pair of texts", 'Give ("<think>", "</think>"), for example'
        )
    return found


def _ids(name: str, tokens: Any) -> tuple[int, ...]:
    found = _listed(name, tokens)
    for token in found:
        _check_number(name, token, int, 0, 2**31)
    return found


def _functions(name: str, given: Any) -> tuple[Any, ...]:
    found = (given,) if callable(given) else _listed(name, given)
    if wrong := [one for one in found if not callable(one)]:
        raise InvalidOption(f"{name} holds {wrong[0]!r}, which is no function", "Give functions")
    return found


def _words(words: Any) -> tuple[str | tuple[int, ...], ...]:
    found = tuple(word if isinstance(word, str) else _ids("bad_words", word) for word in _listed("bad_words", words))
    if not all(found):
        raise InvalidOption("bad_words holds an empty word", "Leave it out")
    return found


def _bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidOption(f"logit_bias={bias!r} is no mapping", "Give {token id: what to add to its logit}")
    for token, by in bias.items():
        _check_number("logit_bias", token, int, 0, 2**31)
        _check_number(f"logit_bias[{token}]", by, float, -math.inf, 1e6)
    return dict(bias)


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidOption(f"{name}={values!r} is no list", "Give a list")
    return tuple(values)
