# ruff: noqa: RUF001 (patterns name characters of many scripts)
"""The text splitters of byte-level BPE tokenizers, by their names in GGUF files (`tokenizer.ggml.pre`).

The patterns come from the models' own tokenizer.json files. If a name does not belong to a single model, they come from
llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True, slots=True)
class Splitter:
    """The first step of a byte-level BPE tokenizer, which splits text before merges are applied.

    Attributes:
        patterns: Each pattern splits the pieces of the previous pattern into matches and gaps.
        digits: True to split numbers into single digits.
        gpt2: True to apply GPT-2's pattern last.
        ignore_merges: True if no merges are applied to a piece that is itself a token.
        nfc: True to normalise the text (NFC) first.
        bos: True if texts begin with BOS when the metadata does not specify it.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Return the pre-tokenizer."""
        steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2))
        return pre_tokenizers.Sequence(steps)


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_TAIL}"
# Like the pattern above, but marks belong to words.
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_KIMI_UPPER, _KIMI_LOWER = (rf"{letters[:-1]}&&[^\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?(?:{_KIMI_UPPER}*{_KIMI_LOWER}+|{_KIMI_UPPER}+{_KIMI_LOWER}*){_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_TAIL}"
)


def _cased(after: str, digits: str) -> str:
    """Return a pattern that splits words between a small letter and a capital letter. `after` may follow each part."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{_UPPER}*{_LOWER}+{after}|{start}{_UPPER}+{_LOWER}*{after}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_GPT4O = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[！…“”‘’—：；，\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[一-龥\u3040-ゟ゠-ヿ]+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CJK = "[一-\u9fa5\u0800-一\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
# Cased letters of an early version of Unicode, without mathematical letters.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)

_SPLITTERS: dict[str, Splitter] = {
    "smollm starcoder refact minerva-7b exaone": Splitter(digits=True, gpt2=True),
    "command-r": Splitter(digits=True, gpt2=True, nfc=True),
    "gpt-2 phi-2 trillion exaone4 a.x-4.0 gigachat granite-docling mellum": Splitter(gpt2=True),
    "olmo mpt": Splitter(gpt2=True, nfc=True),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": Splitter(
        (_LLAMA3,), ignore_merges=True, bos=True
    ),
    "smaug-bpe dbrx chatglm-bpe": Splitter((_LLAMA3,)),
    "glm4 glm5": Splitter((_LLAMA3,), ignore_merges=True),
    "minicpm5": Splitter((r"\p{N}{1,3}", _LLAMA3), ignore_merges=True),
    "kimi-k2": Splitter((_KIMI,), ignore_merges=True),
    "qwen2": Splitter((_QWEN2,), nfc=True),
    "qwen35": Splitter((_QWEN35,), nfc=True),
    "megrez deepseek-r1-qwen stablelm2 hunyuan kormo": Splitter((_QWEN2,)),
    "seed-coder": Splitter((_SEED,)),
    "tekken": Splitter((_cased("", r"\p{N}"),), ignore_merges=True, bos=True),
    "gpt-4o llama4 kanana2": Splitter((_GPT4O,)),
    "tiny_aya": Splitter((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "youtu": Splitter((_YOUTU, _cased(f"{_CONTRACTIONS}?", r"\p{N}")), ignore_merges=True),
    "deepseek-llm": Splitter(
        ("[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK), digits=True
    ),
    "deepseek-coder": Splitter(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK), digits=True),
    "deepseek-v3 hunyuan-dense joyai-llm": Splitter((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3)),
    "viking": Splitter((r" ?[^(\s|.,!?…。，、।۔،)]+",), digits=True),
    "falcon": Splitter((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    # llama.cpp uses this splitter for files that are older than the field.
    "default": Splitter((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}

SPLITTERS = {name: splitter for names, splitter in _SPLITTERS.items() for name in names.split()}
