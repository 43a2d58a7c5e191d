"""A drafter of your own: it proposes a phrase whenever the text has begun it. The text stays the model's."""

from collections.abc import Sequence

import paceline


class Phrases(paceline.Drafter):
    """Drafts the rest of a known phrase after its first three tokens."""

    draft = paceline.DraftBudget.chain(8)

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        self.rest = {tuple(ids[i - 3 : i]): list(ids[i:]) for ids in phrases for i in range(3, len(ids))}
        self.texts: dict[int, list[int]] = {}

    def admit(self, slot, prompt):
        self.texts[slot] = list(prompt)

    def observe(self, slot, verdict, out):
        self.texts[slot] += verdict.tokens

    def release(self, slot):
        self.texts.pop(slot, None)

    def propose(self, asks):
        rests = [self.rest.get(tuple(self.texts[ask.slot][-3:]), []) for ask in asks]
        return [paceline.Draft.chain(rest[: ask.budget.depth]) for rest, ask in zip(rests, asks, strict=True)]


plain = paceline.load("demo", drafter=None)
prompt = "Why is the sky blue?"
expected = plain.generate(prompt, max_new_tokens=48)
mine = paceline.LLM(plain.model, Phrases([expected.token_ids]))  # it knows the answer, so every draft is right
reply = mine.generate(prompt, max_new_tokens=48)
print(reply.text)
print(f"{reply.stats.rounds} rounds instead of {expected.stats.rounds}")
assert reply.token_ids == expected.token_ids or reply.stats.guarantee == "rounding"
