"""`paceline certify`: is the speculation of an endpoint lossless?"""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.certify.options import CertifyOptions


def certify(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Address, such as http://127.0.0.1:8000/v1, or MODEL.")
    ],
    *,
    options: CertifyOptions,
) -> None:
    """Test whether an endpoint's speculation is lossless.

    TARGET is any OpenAI-compatible endpoint with speculation. It is compared with the same model without speculation:
    another endpoint (--plain), or the same one with a field in the request (--plain-body). Paceline serves a MODEL
    itself for the duration of the test.

    The exit code is 0 if the speculation is lossless, 3 if it is not, and 4 if the result is inconclusive.
    API keys are read from $PACELINE_CERTIFY_KEY or $OPENAI_API_KEY, and never written.
    """
    from paceline.certify.command import certify as run

    raise typer.Exit(run(target, options))
