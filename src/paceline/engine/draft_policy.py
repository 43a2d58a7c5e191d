"""The drafters of an engine, by name, and the controllers of their draft lengths."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from secrets import token_hex

from paceline.drafters.base import Ask, Drafter
from paceline.engine.draft_length import Controller
from paceline.errors import InvalidOption
from paceline.types import Draft, DraftBudget
from paceline.verify.tree import check

_LOG = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class Speculation:
    """The drafter and the maximum draft that a request uses.

    Attributes:
        drafter: Name of a loaded drafter. None to use no drafter.
        max_draft: Maximum draft per round. None to use the maximum of the drafter's policy.
    """

    drafter: str | None
    max_draft: DraftBudget | None = None


SPECULATION_OFF = Speculation(None, DraftBudget.chain(0))
"""Plain decoding. Even tokens that a grammar forces are not drafted."""


class DraftPolicy:
    """One drafter of the engine, and its policy for the draft size, which is either fixed or chosen by controllers.

    Attributes:
        name: Name of the drafter.
        drafter: The drafter.
        draft: The fixed size. If the size is not fixed, the drafter's own maximum.
        controllers: One controller for each part of the drafter (`Drafter.parts`). Empty if the size is fixed.
    """

    def __init__(self, name: str, drafter: Drafter, draft: DraftBudget | None) -> None:
        self.name, self.drafter = name, drafter
        self.draft = draft or drafter.draft
        self.controllers = () if draft else self._fresh()
        self._has_failed = False

    def forget(self) -> None:
        """Reset the controllers, as if nothing had been drafted yet."""
        self.controllers = self.controllers and self._fresh()

    def _fresh(self) -> tuple[Controller, ...]:
        return tuple(Controller(*part) for part in self.drafter.parts)

    def check_drafts(self, asks: Sequence[Ask], drafts: Sequence[Draft], vocab_size: int) -> None:
        """Check the drafts, because the drafter may be written by a user. Log a warning if the drafter failed on a
        token.

        Args:
            asks: The requests for drafts.
            drafts: One draft per ask.
            vocab_size: Size of the target's vocabulary.

        Raises:
            InvalidOption: If a draft is missing or invalid.
        """
        if not self._has_failed and any(ask.sampler.draft_failures for ask in asks):
            self._has_failed = True
            _LOG.warning(
                "Drafter %s failed on a token and proposed nothing for it: its logits are not finite, or a logits "
                "processor raised an error. Replies stay correct, but may be slower. Statistics count these failures "
                "as draft_failures, and the debug log shows each of them. This warning is not repeated.",
                self.name,
            )
        if len(drafts) != len(asks):
            raise InvalidOption(
                f"{type(self.drafter).__name__} returned {len(drafts)} drafts for {len(asks)} requests",
                "Return one Draft per ask from propose, or an empty Draft() if there is nothing to propose",
            )
        for draft, ask in zip(drafts, asks, strict=True):
            check(draft)
            most = ask.budget.nodes
            if len(draft.tokens) > most or any(not 0 <= t < vocab_size for t in draft.tokens):
                raise InvalidOption(
                    f"{type(self.drafter).__name__} drafted {len(draft.tokens)} tokens {draft.tokens}",
                    f"Draft at most {most} tokens here, with ids from 0 to {vocab_size - 1}",
                )


def shown_name(name: str) -> str:
    """Return a drafter's name without the paths of local folders, for example `model:draft` for
    `model:/home/me/draft`."""
    return re.sub(r"(?<=[:@])[^:@]+", lambda found: _base(found[0]), name)


def _base(reference: str) -> str:
    path = Path(reference)
    local = path.is_absolute() or reference.startswith((".", "~")) or path.exists()
    return path.name or path.resolve().name if local else reference


class DraftPolicies:
    """The drafters of an engine, by name. The first drafter is the default. A single drafter is named after its class.

    Each drafter has two names: the name under which it was loaded, and a public name without the paths of local
    folders.
    """

    def __init__(self, drafters: Drafter | Mapping[str, Drafter] | None, draft: DraftBudget | None) -> None:
        named = {type(drafters).__name__: drafters} if isinstance(drafters, Drafter) else drafters or {}
        self._named: dict[str, DraftPolicy] = {}
        for name, drafter in named.items():
            policy = DraftPolicy(self._unused(shown_name(name)), drafter, draft)
            self._named |= {policy.name: policy, name: policy}
        self.default = Speculation(next(iter(self._named), None))
        self._private: dict[str, DraftPolicy] = {}
        self._draft = draft

    def _unused(self, name: str) -> str:
        """Return a name that is not used yet. If drafters come from different folders with the same name, they are
        numbered."""
        return next(free for n in count(1) if (free := name if n == 1 else f"{name}-{n}") not in self._named)

    def add_private(self, name: str, drafter: Drafter) -> str:
        """Add a drafter that can only be chosen by a secret name. It has learned from the texts of one client, so other
        clients must not be able to use it.

        Args:
            name: Unique name for statistics and cached states.
            drafter: The drafter, bound to the engine's cache.

        Returns:
            The secret name to use as `Speculation.drafter`.
        """
        secret = token_hex(16)
        self._private = self._private | {
            secret: DraftPolicy(name, drafter, self._draft)
        }  # replace the dict, because another thread may be iterating over it
        return secret

    def remove_private(self, secret: str) -> None:
        """Remove a private drafter. Requests that already use it keep it until they end."""
        self._private = {name: policy for name, policy in self._private.items() if name != secret}

    def given_name(self, policy: DraftPolicy) -> str:
        """Return the name under which a public drafter was loaded. It may contain the path of a local folder."""
        return [name for name, one in self._named.items() if one is policy][-1]

    @property
    def public(self) -> list[DraftPolicy]:
        """The drafters that requests can choose by name."""
        return list(dict.fromkeys(self._named.values()))

    def __getitem__(self, name: str | None) -> DraftPolicy | None:
        """Return the policy with this name. Return None if the name is None.

        Raises:
            InvalidOption: If no drafter with this name is loaded.
        """
        if name is None:
            return None
        if name in self._private:
            return self._private[name]
        if name not in self._named:
            names = ", ".join(policy.name for policy in self.public)
            raise InvalidOption(f"no drafter {name!r} is loaded", f"Loaded drafters: {names or 'none'}")
        return self._named[name]

    def __iter__(self) -> Iterator[DraftPolicy]:
        return iter([*self.public, *self._private.values()])
