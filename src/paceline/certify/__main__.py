"""`python -m paceline.certify`."""

from __future__ import annotations

import sys

from paceline.certify.command import certify
from paceline.certify.options import CertifyOptions, parser
from paceline.errors import PacelineError


def main() -> int:
    """Parse the command line, and return the exit code."""
    given = vars(parser().parse_args())
    target = given.pop("target")
    try:
        return certify(target, CertifyOptions(**given))
    except (PacelineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
