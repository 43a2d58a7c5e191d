"""The sampling parameters of a reply, and the checks of their values."""

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
"""The parameters that a model's generation_config.json may recommend."""


def changed(sampling: Sampling, changes: Mapping[str, Any]) -> Sampling:
    """Return a copy of `sampling` with changed parameters. Raise `InvalidOption` if a parameter is unknown."""
    known = [field.name for field in fields(Sampling)]
    for name in changes:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.5)
            fix = f"Did you mean {near[0]}?" if near else f"Available: {', '.join(known)}"
            raise InvalidOption(f"{name!r} is not a sampling parameter", fix)
    return replace(sampling, **changes) if changes else sampling


def recommended(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that a generation_config.json recommends. The result is empty if it recommends greedy
    decoding."""
    own = {name: generation[name] for name in RECOMMENDED if generation.get(name) is not None}
    if not generation.get("do_sample", bool(own.get("temperature"))):
        return {}
    if own.get("top_k") == -1:  # vLLM writes -1 for "all tokens"
        own["top_k"] = 0
    # transformers does not write temperature 1, its default, to the file.
    return {"temperature": 1.0, **own}


StopWhen = Callable[[Sequence[int], str], bool]
"""(token ids of the reply so far, text of the reply so far) -> True if the reply ends here."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's vocabulary. Some sampling parameters need it.

    Attributes:
        size: Number of tokens.
        eos: End-of-sequence tokens.
        encode: Text -> token ids, without BOS and EOS.
        tokenizer: The tokenizer. Grammars need it.
    """

    size: int
    eos: Sequence[int] = ()
    encode: Callable[[str], list[int]] | None = None
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a reply. The default is greedy.

    The parameters from `repetition_penalty` to `grammar` change logits, in this order, before the temperature. Drafted
    tokens are treated like all other tokens. Then the parameters from `top_n_sigma` to `xtc_threshold` truncate the
    distribution, in this order.

    Attributes:
        max_new_tokens: Maximum number of tokens in the reply, including EOS. >= 0.
        temperature: 0 is greedy. Values > 0 sample from softmax(logits / temperature).
        repetition_penalty: Values > 1 make tokens of prompt and reply less likely, as in transformers. 0.01 to 1000; 1
            turns it off.
        frequency_penalty: Subtracted from a logit for each occurrence of the token in the reply, as in OpenAI's API. -2
            to 2.
        presence_penalty: Subtracted from a logit once if the token occurs in the reply, as in OpenAI's API. -2 to 2.
        logit_bias: Token id -> number to add to its logit. -inf bans the token.
        bad_words: Banned sequences: strings (with and without a space before them) or sequences of token ids.
        dry_multiplier: Strength of the DRY penalty, as in llama.cpp. A token that would extend a repetition of n >=
            `dry_allowed_length` tokens loses multiplier * `dry_base` ** (n - `dry_allowed_length`). 0 turns it off.
        dry_base: See `dry_multiplier`.
        dry_allowed_length: See `dry_multiplier`.
        dry_penalty_last_n: DRY looks for repetitions in this many tokens at the end of prompt and reply. -1 means all.
        dry_sequence_breakers: Strings that end a repetition for DRY.
        no_repeat_ngram_size: No n-gram of this size may occur twice in prompt and reply. 0 turns it off.
        min_new_tokens: EOS and `stop_token_ids` are banned until the reply has this many tokens. `stop` and `stop_when`
            may still end it earlier.
        thinking_budget: Maximum number of tokens of reasoning (see `reasoning`). After this number, the end of the
            reasoning is forced. None means no limit.
        processors: Your own functions of (prefix, logits [V]) that return the logits to use. `prefix` is a
            `sampler.Prefix`. They are also called for drafted tokens. An error at a drafted token ends the reply
            only if the reply reaches that token.
        grammar: Grammar of the reply. If it allows only EOS, the reply ends even before `min_new_tokens`.
        top_n_sigma: Keep tokens with a logit within this many standard deviations of the highest logit. 0 keeps all.
        top_k: Keep the k most likely tokens. 0 keeps all.
        top_p: Keep the most likely tokens until their probabilities add up to p. 1 keeps all, and 0 only the most
            likely token.
        min_p: Keep tokens that are at least min_p times as likely as the most likely token. 0 keeps all.
        typical_p: Keep the tokens whose surprise is nearest to the expected surprise, until their probabilities add up
            to p. 1 keeps all.
        xtc_probability: Probability that XTC drops all tokens whose probability is at least `xtc_threshold`, except the
            least likely of them. The seed and the position decide this for each token of the reply. 0 turns it off.
        xtc_threshold: See `xtc_probability`.
        rule: The acceptance rule for drafted tokens (`verify/rules.py`). "match", the default, gives the same text with
            any drafter, or without one. "rejection" and "block" keep the distribution. "typical" is lossy: it changes
            the distribution.
        seed: A number from -2**63 to 2**63 - 1, taken modulo 2**63. None draws a seed, which the statistics report.
        stop: Strings that end the reply. The text ends before them.
        stop_token_ids: Tokens that end the reply.
        reasoning: Markers around reasoning at the beginning of the reply, such as ("<think>", "</think>"). Stop strings
            are ignored between them. The first marker is "" if the prompt ends inside the reasoning. Empty means that
            there is no reasoning.
        stop_when: Functions of (token ids of the reply so far, its text so far) that return True where the reply ends.
            They are called after every token, drafted or not, in order. If a round is repeated after a failure, they
            may be called twice for the same token, so the result must depend only on the arguments.
        ignore_eos: Continue after the model's end-of-sequence tokens.
        logprobs: Number of most likely tokens to report with the log-probability of each token. 0 reports only the
            log-probability of the token itself. None reports no log-probabilities. They are computed from the unchanged
            logits.
        prediction: Text or token ids that the reply is expected to contain, such as a file to edit. It is used as a
            draft, and does not change the text.

    Raises:
        InvalidOption: If a value is not valid.
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
            raise InvalidOption("typical_p must be > 0, got 0", "Use a number up to 1; 1 turns it off", "typical_p")
        if 0.0 < self.temperature < 1e-3:
            raise InvalidOption(
                f"temperature={self.temperature} is too small to divide by",
                "Use 0 for greedy text, or at least 0.001",
                "temperature",
            )
        if self.rule not in get_args(RuleName):
            raise InvalidOption(f"rule={self.rule!r} is unknown", f"Use one of {', '.join(get_args(RuleName))}", "rule")
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidOption(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}",
                "Lower min_new_tokens or raise max_new_tokens",
                "min_new_tokens",
            )
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidOption(
                f"grammar={self.grammar!r} is not a Grammar", "Use Grammar.json_schema(...), for example", "grammar"
            )
        if self.grammar and self.ignore_eos:
            raise InvalidOption(
                "grammar and ignore_eos exclude each other: a grammar ends with EOS", "Drop one of them", "grammar"
            )
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
        """Return these parameters with a seed. If there is none, draw one."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))

    def sampler(self, sample: int = 0, vocabulary: Vocabulary | None = None) -> Sampler:
        """Create the sampler for one reply. Draw a seed if there is none.

        Args:
            sample: Index of the reply among several replies to the same prompt.
            vocabulary: The model's vocabulary. None skips the checks of token ids.

        Raises:
            InvalidOption: If a parameter names tokens that the vocabulary lacks.
        """
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
        """Create the logits processors, in the order of their application."""
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
        # The grammar comes last, so that no processor can allow a token that the grammar forbids.
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
        # Leave out stop tokens that are ordinary text, because the grammar may need them inside its texts.
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
                raise InvalidOption(
                    f"bad_words contains the string {word!r}, which needs a tokenizer",
                    "Give token ids instead",
                    "bad_words",
                )
            spelled = spellings(word, vocabulary.encode)
            if not spelled:
                raise InvalidOption(
                    f"bad_words contains {word!r}, which the tokenizer turns into no tokens",
                    "Leave it out",
                    "bad_words",
                )
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
                    f"{name} contains {wrong[0]}, which is not a token of the model",
                    f"Use ids from 0 to {vocabulary.size - 1}",
                    name,
                )
        if (self.logprobs or 0) > vocabulary.size:
            raise InvalidOption(
                f"logprobs={self.logprobs} is more than the model's {vocabulary.size} tokens",
                "Lower logprobs",
                "logprobs",
            )


def _tokenizer(vocabulary: Vocabulary | None, what: str) -> Tokenizer:
    if vocabulary is None or vocabulary.tokenizer is None:
        raise InvalidOption(f"{what} needs a tokenizer", "Generate with an LLM, which has a tokenizer")
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


def _check_number(
    name: str, value: object, kind: type[float], low: float, high: float, param: str | None = None
) -> None:
    """Raise `InvalidOption` unless a number is in range.

    Args:
        name: The number's name in the error.
        value: The number.
        kind: int, or float for ints and floats.
        low: The smallest number allowed.
        high: The largest number allowed.
        param: The parameter, if `name` is a part of it.
    """
    noun, limits = ("whole number", f"{low} to {high}") if kind is int else ("number", f"{low:g} to {high:g}")
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise InvalidOption(f"{name} must be a {noun}, got {value!r}", f"Use a number from {limits}", param or name)
    if not low <= value <= high:
        raise InvalidOption(f"{name}={value!r} is out of range", f"Use a {noun} from {limits}", param or name)


def _strings(name: str, texts: Any) -> tuple[str, ...]:
    found = (texts,) if isinstance(texts, str) else _listed(name, texts)
    if any(not isinstance(text, str) or not text for text in found):
        raise InvalidOption(
            f"{name}={texts!r} contains something other than non-empty strings", "Use only non-empty strings", name
        )
    return found


def _budget(budget: Any, reasoning: Sequence[str]) -> ThinkingBudget | None:
    if budget is None:
        return None
    tokens = budget.tokens if isinstance(budget, ThinkingBudget) else budget
    _check_number("thinking_budget", tokens, int, 0, 2**31)
    if isinstance(budget, ThinkingBudget):
        _reasoning((budget.start, budget.end))
        if not isinstance(budget.forced, str):
            raise InvalidOption(f"thinking_budget forces {budget.forced!r}, which is not a string", "Use a string")
        return budget
    if not reasoning:
        raise InvalidOption(
            "thinking_budget needs `reasoning`, the markers around it",
            'Also pass reasoning=("<think>", "</think>")',
            "thinking_budget",
        )
    return ThinkingBudget(budget, *reasoning)


def _reasoning(markers: Any) -> tuple[str, ...]:
    found = _listed("reasoning", markers)
    if found and (len(found) != 2 or any(not isinstance(s, str) for s in found) or not found[1]):
        raise InvalidOption(
            f"reasoning={markers!r} is not a pair of strings", 'Use ("<think>", "</think>"), for example', "reasoning"
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
        raise InvalidOption(f"{name} contains {wrong[0]!r}, which is not a function", "Use only functions", name)
    return found


def _words(words: Any) -> tuple[str | tuple[int, ...], ...]:
    found = tuple(word if isinstance(word, str) else _ids("bad_words", word) for word in _listed("bad_words", words))
    if not all(found):
        raise InvalidOption("bad_words contains an empty word", "Leave it out", "bad_words")
    return found


def _bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidOption(
            f"logit_bias={bias!r} is not a mapping", "Use {token id: number to add to its logit}", "logit_bias"
        )
    for token, by in bias.items():
        _check_number("logit_bias", token, int, 0, 2**31)
        _check_number(f"logit_bias[{token}]", by, float, -math.inf, 1e6, "logit_bias")
    return dict(bias)


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidOption(f"{name}={values!r} is not a list", "Use a list", name)
    return tuple(values)
