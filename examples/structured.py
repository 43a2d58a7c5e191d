"""JSON of a schema: keys and brackets, which leave no choice, are drafted for free. Needs the extra "grammar"."""

import json

import paceline

schema = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "population_in_millions": {"type": "integer", "minimum": 0, "maximum": 40},
    },
    "required": ["city", "country", "population_in_millions"],
    "additionalProperties": False,
}

llm = paceline.load("demo")
grammar = paceline.Grammar.json_schema(schema)
reply = llm.generate("Describe the largest city of France as JSON.", grammar=grammar)
print(json.loads(reply.text))
print(f"{len(reply.token_ids)} tokens in {reply.stats.rounds} rounds")
assert list(json.loads(reply.text)) == schema["required"]
