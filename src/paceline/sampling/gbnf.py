"""GBNF, the grammar format of llama.cpp. llguidance's converter runs in a fork (`paceline.text.sandbox`)."""

from __future__ import annotations


def to_lark(text: str) -> str:
    """Convert a GBNF grammar to a Lark grammar.

    Raises:
        ValueError: If the grammar is not valid.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
