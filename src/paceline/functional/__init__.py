"""Speculative decoding for your own engine: batched functions on plain tensors. They need no model, no cache and no
state.

    tree = grow(step, root_logits, TreeConfig(branch=4, depth=5, max_nodes=24))
    accepted = verify_greedy(tree, target_logits)
    tokens, lengths = append(tokens, lengths, accepted)

Rows are numbered as everywhere in Paceline (`types.py`): row 0 is the pending token, node i is row i + 1, and parents
are row numbers. `lengths` [B] is always the number of tokens of a request that have keys in the cache, which equals the
position of the pending token. So the text of request b is `tokens[b, : lengths[b] + 1]`, and its last token is the
pending token.

    B  requests     N  nodes, padded     T  N + 1 rows     D  depth     V  vocabulary     H  hidden size

Padding is -1 and comes last. Shapes depend only on the configuration. Trees are built and walked on the host, by the
same code as in Paceline's engine. `grow` and `sample` wait for the device once per level. The `verify_` functions wait
once, and if they draw random numbers, once more for each visited row. Logits may have any float dtype. Half precision
is first converted to float32. docs/how-to/own-engine.md shows a whole loop.
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
