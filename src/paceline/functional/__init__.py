"""Speculative decoding for an engine of your own: batched functions on plain tensors, no model, cache or state.

    tree = grow(step, root_logits, TreeConfig(branch=4, depth=5, max_nodes=24))
    accepted = verify_greedy(tree, target_logits)
    tokens, lengths = append(tokens, lengths, accepted)

Rows are as everywhere in Paceline (`types.py`): row 0 carries the pending token, node i is row i + 1, and parents are
row numbers. There is one `lengths` [B], everywhere: how many tokens of a request have their keys in the cache, which
is where the pending token stands. So request b's text is `tokens[b, : lengths[b] + 1]`, and its last is pending.

    B  requests     N  nodes, padded     T  N + 1 rows     D  depth     V  vocabulary     H  hidden size

Padding is -1 and lies at the end. Shapes depend on the configuration alone. Trees grow and are walked on the host, by
the code of Paceline's own engine: `grow` and `sample` wait for the device once per level, the `verify_` functions once,
and once more per visited row where they draw. Logits may have any float dtype; less than float32 is widened first.
docs/how-to/own-engine.md shows a whole loop.
"""

from paceline.functional.candidates import (
    CandidateTree,
    TopK,
    TreeConfig,
    attention_bias,
    inputs,
    mask,
    paths,
    positions,
    topk,
)
from paceline.functional.growth import Level, cartesian, from_choices, from_heads, grow, sample
from paceline.functional.verification import (
    Accepted,
    append,
    gather_kv_,
    verify_greedy,
    verify_rejection,
    verify_sampling,
)

__all__ = [
    "Accepted",
    "CandidateTree",
    "Level",
    "TopK",
    "TreeConfig",
    "append",
    "attention_bias",
    "cartesian",
    "from_choices",
    "from_heads",
    "gather_kv_",
    "grow",
    "inputs",
    "mask",
    "paths",
    "positions",
    "sample",
    "topk",
    "verify_greedy",
    "verify_rejection",
    "verify_sampling",
]
