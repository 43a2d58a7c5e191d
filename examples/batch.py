"""Answer several prompts in shared passes, two replies each. Every reply is the one that its prompt gets alone."""

import paceline

PROMPTS = ["Why is the sky blue?", "Name three colours.", "Write a line about the sea."]

llm = paceline.load("demo")
sampling = llm.sampling(max_new_tokens=32, temperature=0.8, seed=7)

replies = llm.generate(PROMPTS, sampling, n=2, width=8)
for index, reply in enumerate(replies):
    print(f"{PROMPTS[index // 2]} ({index % 2 + 1}) {reply.text!r}")

alone = llm.generate(PROMPTS[0], sampling)
print("as alone:", alone.token_ids == replies[0].token_ids)
assert alone.token_ids == replies[0].token_ids or llm.guarantee == "rounding"
