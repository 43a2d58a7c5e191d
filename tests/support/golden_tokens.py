"""Tokens of the demo model, as transformers reads its file, stored in tests/golden/demo-tokens.json.

`python -m tests.support.golden_tokens` writes the file.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.awkward_texts import AWKWARD

FILE = Path(__file__).parents[1] / "golden" / "demo-tokens.json"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>ünd</b>"}]


@cache
def tokens() -> dict[str, Any]:
    """Return the stored results of `made`."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def digest(vocabulary: dict[str, int]) -> str:
    """Return the SHA-256 of a vocabulary."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


def made(path: Path) -> dict[str, Any]:
    """Read a GGUF's tokenizer with transformers' own code for vocabulary, merges and special tokens.

    Its GGUF code omits SmolLM2's digit splitting, which this function adds.

    Returns:
        The SHA-256 of the vocabulary, its special ids, ids and decoded text of each awkward text, and a chat.
    """
    import transformers
    from tokenizers import pre_tokenizers

    reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ids = [reference.encode(text) for text in AWKWARD]
    return {
        "vocabulary": digest(reference.get_vocab()),
        "special": sorted(set(reference.all_special_ids) | set(reference.added_tokens_decoder)),
        "ids": ids,
        "texts": [reference.decode(some, skip_special_tokens=True) for some in ids],
        "chat": reference.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True),
    }


if __name__ == "__main__":
    from paceline.files.locate import resolve

    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(made(resolve("demo", quiet=True))) + "\n")
