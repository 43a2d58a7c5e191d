"""Stream a chat as it is written, marking drafted tokens, then show what speculation did."""

import paceline

llm = paceline.load("demo")
messages = [
    {"role": "system", "content": "You repeat what the user writes."},
    {"role": "user", "content": "The quick brown fox jumps over the lazy dog. The quick brown fox jumps again."},
]

with llm.stream(messages, max_new_tokens=48) as stream:
    for chunk in stream:
        print(f"[{chunk.text}]" if chunk.drafted else chunk.text, end="", flush=True)

stats = stream.completion.stats
print(f"\n{stats.tokens} tokens in {stats.rounds} rounds; {stats.accepted} of {stats.drafted} drafted tokens accepted")
for phase, seconds in stats.seconds.items():
    print(f"{phase:>8} {1000 * seconds:7.1f} ms")
