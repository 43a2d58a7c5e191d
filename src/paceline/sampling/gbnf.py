"""GBNF, the grammars of llama.cpp. The converter is llguidance's, which runs in a fork (`paceline.text.sandbox`)."""

from __future__ import annotations


def to_lark(text: str) -> str:
    """Return a GBNF grammar as a Lark grammar. Raises `ValueError`."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
