"""Programs to compare with that cost nothing, good and bad ones; begun in processes of their own by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from paceline.bench.measure import Reply
from paceline.bench.peers import Ask, Job, Missing


def counting(job: Job) -> Callable[[Ask], Reply]:
    """Writes what it was told and asked, as numbers; and prints to stdout, as libraries do."""
    print("loading ...")

    def answer(ask: Ask) -> Reply:
        print("working ...")
        told = [job.tokens, job.positions, job.threads, *job.eos]
        return Reply([*told, len(ask.prompt), int(ask.lookup), round(10 * ask.temperature), ask.seed], 0.25)

    return answer


def absent(job: Job) -> Callable[[Ask], Reply]:
    raise Missing("absent is not installed", "pip install absent")


def broken(job: Job) -> Callable[[Ask], Reply]:
    raise RuntimeError("no such\ninstruction")


def without_lookup(job: Job) -> Callable[[Ask], Reply]:
    def answer(ask: Ask) -> Reply:
        if ask.lookup:
            raise ValueError("prompt lookup is greedy only")
        return Reply([1, 2, 3], 0.01)

    return answer


def dying(job: Job) -> Callable[[Ask], Reply]:
    """Its third reply is its last word."""
    left = [2]

    def answer(ask: Ask) -> Reply:
        if not left[0]:
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        left[0] -= 1
        return Reply([1], 0.01)

    return answer
