"""OpenAI's client against a server that this script starts. Needs the extra "serve" and `pip install openai`."""

import re
import subprocess
import sys

from openai import OpenAI

command = [sys.executable, "-m", "paceline", "serve", "--model", "demo", "--port", "0"]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
try:
    assert server.stderr
    address = next(found[0] for line in server.stderr if (found := re.search(r"http://[0-9.:]+/v1", line)))
    client = OpenAI(base_url=address, api_key="none")
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Count from one to five."}],
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculation": {"drafter": "ngram"}},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print("\n", chunk.usage.speculation, sep="")
finally:
    server.terminate()
    server.wait(60)
