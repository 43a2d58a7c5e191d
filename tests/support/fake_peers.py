"""Fake peers, working and failing, that tests start by name in separate processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from paceline.bench.measure import MeasuredReply
from paceline.bench.peers import PeerPrompt, PeerSetup, PeerUnavailable


def counting(setup: PeerSetup) -> Callable[[PeerPrompt], MeasuredReply]:
    """Answer with the setup and the prompt as numbers, and print to stdout as libraries do."""
    print("loading ...")

    def answer(ask: PeerPrompt) -> MeasuredReply:
        print("working ...")
        told = [setup.tokens, setup.positions, setup.threads, *setup.eos]
        return MeasuredReply(
            [*told, len(ask.prompt), int(bool(ask.drafter)), round(10 * ask.temperature), ask.seed], 0.25
        )

    return answer


def absent(setup: PeerSetup) -> Callable[[PeerPrompt], MeasuredReply]:
    raise PeerUnavailable("absent is not installed", "pip install absent")


def broken(setup: PeerSetup) -> Callable[[PeerPrompt], MeasuredReply]:
    raise RuntimeError("no such\ninstruction")


def without_lookup(setup: PeerSetup) -> Callable[[PeerPrompt], MeasuredReply]:
    def answer(ask: PeerPrompt) -> MeasuredReply:
        if ask.drafter:
            raise ValueError("prompt lookup is greedy only")
        return MeasuredReply([1, 2, 3], 0.01)

    return answer


def dying(setup: PeerSetup) -> Callable[[PeerPrompt], MeasuredReply]:
    """End the process at the third prompt."""
    left = [2]

    def answer(ask: PeerPrompt) -> MeasuredReply:
        if not left[0]:
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        left[0] -= 1
        return MeasuredReply([1], 0.01)

    return answer
