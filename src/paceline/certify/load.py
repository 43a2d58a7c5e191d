"""Replies under load: do they depend on the batch, and does each request get its own reply?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.certify.compare import ALPHA, Sides, explain
from paceline.certify.side import Side
from paceline.certify.statistics import fisher


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Replies under load, compared with the same side's reply to the same request without load.

    Attributes:
        width: Number of simultaneous requests.
        requests: Requests per side.
        changed: Replies of the speculative side that changed, except at near-ties.
        plain_changed: The same for the plain side, which shows how much plain decoding depends on the batch.
        swapped: Changed replies of the speculative side that are the reply to another request.
        p_value: Fisher's exact test: small if speculation makes more replies change.
    """

    width: int
    requests: int
    changed: int
    plain_changed: int
    swapped: int
    p_value: float

    @property
    def differs(self) -> bool:
        """True if speculation makes more replies depend on the batch."""
        return self.p_value < ALPHA


def compare_load(sides: Sides, texts: Mapping[str, tuple[str, str]], tokens: int, rounds: int = 3) -> list[LoadResult]:
    """Ask prompts 4 and 16 at a time.

    Args:
        sides: Both sides.
        texts: Prompt -> texts of both sides without load. Each side repeats them.
        tokens: Maximum length of a reply, the same as for these texts.
        rounds: Number of rounds if the speculative side changes more replies in the first one.
    """
    solo = dict(list(texts.items())[:16])
    results: list[LoadResult] = []
    for width in sides.in_time((4, 16) if len(solo) > 3 else ()):
        sides.note(f"load: {width} at a time")
        count, swapped, asked = [0, 0], 0, 0
        for done in range(rounds):
            asked += len(solo)
            for i, side in enumerate((sides.speculative, sides.plain)):
                changed = _changed(sides, side, {prompt: both[i] for prompt, both in solo.items()}, tokens, width)
                count[i] += len(changed)
                if i == 0:
                    swapped += sum(
                        any(text == both[0] for other, both in solo.items() if other != prompt)
                        for prompt, text in changed.items()
                    )
            if done == 0 and count[0] <= count[1]:
                break
        results.append(LoadResult(width, asked, count[0], count[1], swapped, fisher(count[0], asked, count[1], asked)))
    return results


def _changed(sides: Sides, side: Side, solo: Mapping[str, str], tokens: int, width: int) -> dict[str, str]:
    """Return prompt -> text for replies that differ from the side's replies without load, except at near-ties."""
    fields: dict[str, Any] = {"max_tokens": tokens}
    replies = sides.run_concurrently(lambda prompt: (prompt, side.ask(prompt, **fields).text), solo, width)
    other = {prompt: text for prompt, text in replies if text != solo[prompt]}
    pair = Sides(side, side, near_tie_gap=sides.near_tie_gap)
    return {
        prompt: text
        for prompt, text in other.items()
        if not explain(pair, "", prompt, fields, text, solo[prompt]).is_near_tie
    }
