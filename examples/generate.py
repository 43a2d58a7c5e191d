"""Generate a reply, and check that it does not depend on the drafter."""

import paceline

PROMPT = "Name the planets of the solar system."

fast = paceline.load("demo")  # the default drafter, "suffix"
plain = paceline.load("demo", drafter=None)

options = {"max_new_tokens": 48, "temperature": 0.7, "seed": 1}
reply = fast.generate(PROMPT, **options)
print(reply.text)
print(f"{reply.stats.tokens_per_round:.2f} tokens per round, guarantee: {reply.stats.guarantee}")

same = plain.generate(PROMPT, **options).token_ids == reply.token_ids
print("the same text without a drafter:", same)
assert same or reply.stats.guarantee == "rounding"
