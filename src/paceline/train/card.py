"""The model card of a trained drafter: how it was made, and how far it can be trusted."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paceline.train.loop import Report
    from paceline.train.run import TrainJob


def card(order: TrainJob, report: Report, trained: int, held: int, covered: float) -> str:
    """Markdown. `trained`, `held`: documents; `covered`: share of the answers' tokens in the draft vocabulary."""
    return f"""\
# {order.kind} drafter for {order.target}

Made by Paceline {version("paceline")} with torch {torch.__version__}:

    {order.command}

- Data: {trained} answers of the target's own to prompts of {_source(order)}, {order.plan.epochs:g} epochs,
  {report.tokens:,} places to draft from. {held} answers to one prompt in fifty were held out.
- Seed {order.plan.seed}; {report.seconds / 60:.0f} minutes of training on {_hardware()}.
- Draft vocabulary: {order.vocabulary or "the whole"} tokens, {100 * covered:.1f} % of what the target wrote.
- {_measured(report, min(order.plan.held, held))}

It drafts for this target only. What it drafts never changes the text.
"""


def _measured(report: Report, held: int) -> str:
    if report.acceptance is None:
        return "Not measured: of so few prompts none were held out."
    steps = ", ".join(f"{share:.3f}" for share in report.held)
    return f"""\
On {held} held-out answers a greedy chain of {len(report.held)} would give {report.acceptance:.2f} tokens per round,
  bonus token included. Accuracy of each step, whether or not those before it were right: {steps}."""


def _source(order: TrainJob) -> str:
    return order.prompts.name if order.prompts else "its own making"


def _hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} CPU threads"
