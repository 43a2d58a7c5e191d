"""The command: from a target and options to a certificate, its files and the exit code."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline import __version__
from paceline.certify.certificate import Certificate
from paceline.certify.compare import Sides
from paceline.certify.options import CertifyOptions, parse_body
from paceline.certify.own import request_fields, serve_locally
from paceline.certify.prompts import NamedPrompt
from paceline.certify.report import write, writer
from paceline.certify.run import examine
from paceline.certify.servers import detect, first_model, version
from paceline.certify.side import Side
from paceline.certify.sizes import WorkSizes
from paceline.certify.transport import Http
from paceline.errors import InvalidOption, one_line

_MAX_FILE_BYTES = 64 << 20


def certify(target: str, options: CertifyOptions) -> int:
    """Test a target, print and write the certificate.

    Args:
        target: Address of the API with speculation, or a model that Paceline can load.
        options: Options of the command.

    Returns:
        The exit code: 0 lossless, 3 not lossless, 4 inconclusive.

    Raises:
        PacelineError: If an option is not valid, or an endpoint fails.
    """
    sizes = options.sizes()
    for path in options.out or ():
        writer(path)
    prompts = _read_prompts(options.prompts) if options.prompts else []
    with ExitStack() as stack:
        is_address = "://" in target
        if not is_address:
            _confirm(sizes, len(prompts), options.yes)
        base = target if is_address else stack.enter_context(serve_locally(target, options.drafter, options.against))
        sides, facts = _sides(target, base, options)
        if is_address:
            _confirm(sizes, len(prompts), options.yes)
        certificate = examine(sides, sizes, facts, prompts, options.seed)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    _print(certificate)
    for path in options.out or ():
        write(certificate, path)
    return certificate.exit_code


def _sides(target: str, base: str, options: CertifyOptions) -> tuple[Sides, dict[str, Any]]:
    """Return the endpoints of both sides, and the facts about them."""
    key = os.environ.get("PACELINE_CERTIFY_KEY") or os.environ.get("OPENAI_API_KEY")
    own = Http(base, key, options.timeout)
    plain = Http(options.plain, key, options.timeout) if options.plain else own
    extra = parse_body("--body", options.body) if options.body else {}
    plain_extra = parse_body("--plain-body", options.plain_body) if options.plain_body else {}
    known = detect(own)
    if "://" not in target:
        extra, plain_extra = request_fields(options.drafter, options.against)
    elif not (options.plain or options.plain_body or options.plain_model):
        if known is None or not known.plain:
            name, hint = (known.name, known.hint) if known else ("this server", "Start a second server")
            fix = f"{hint}, and give --plain URL; or give --plain-body JSON"
            raise InvalidOption(f"{name} has no known switch for speculation", fix)
        plain_extra = dict(known.plain)
    model = options.model or first_model(own)
    plain_model = options.plain_model or options.model or (first_model(plain) if options.plain else model)
    raw = options.api == "completions"
    sides = Sides(
        Side("speculative", own, model, extra, raw),
        Side("plain", plain, plain_model, plain_extra, raw),
        options.concurrency,
        options.near_tie,
        _StatusLine(),
        "://" not in target and options.against != "none",
    )
    facts = {
        "target": _address(target),
        "plain": _address(options.plain) if options.plain else "the same server",
        "server": known.name if known else "unknown",
        "version": version(own),
        "plain version": version(plain),
        "model": str(model),
        "plain model": str(plain_model),
        "body": json.dumps(extra),
        "plain body": json.dumps(plain_extra),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "seed": options.seed,
        "near-tie": f"below {options.near_tie} nats",
        "paceline": __version__,
        "command": " ".join(_address(word) for word in sys.argv[1:]),
    }
    return sides, facts


def _address(text: str) -> str:
    """Return an address without its query, which may contain a key."""
    if "://" not in text:
        return text
    parts = urlsplit(text)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _confirm(sizes: WorkSizes, prompts: int, yes: bool) -> None:
    """Print how many requests the test needs, and wait for the user's consent."""
    if prompts:
        sizes = WorkSizes(prompts, *(getattr(sizes, name) for name in list(WorkSizes.__slots__)[1:]))
    work = f"up to {sizes.requests():,} requests and {sizes.most_tokens():,} generated tokens"
    print(
        f"This sends {work}, in at most {sizes.seconds / 60:.0f} minutes. Requests whose replies differ are repeated.",
        file=sys.stderr,
    )
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidOption("there is no terminal to ask for consent", "Add --yes")
    if input("Continue? [y/N] ").strip().casefold() not in ("y", "yes"):
        raise InvalidOption("nothing was sent")


def _read_prompts(path: Path) -> list[NamedPrompt]:
    """Read prompts of a JSONL file. Raise `InvalidOption` if a line is not valid."""
    with path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES)
    found = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, TypeError, KeyError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise InvalidOption(f"{path}, line {number} has no prompt", 'Write {"prompt": "..."} on each line')
        found.append(NamedPrompt("own", f"prompt {number}", text))
    if not found:
        raise InvalidOption(f"{path} has no prompts", 'Write {"prompt": "..."} on each line')
    return found


class _StatusLine:
    """Shows progress on a terminal in one line, and elsewhere the name of each part."""

    def __init__(self) -> None:
        self.part = ""

    def __call__(self, text: str) -> None:
        part = text.partition(":")[0]
        if sys.stderr.isatty():
            print(f"\r\x1b[K{one_line(text, 70)}", end="", file=sys.stderr, flush=True)
        elif part != self.part:
            print(f"{time.strftime('%H:%M:%S')} {part}", file=sys.stderr, flush=True)
        self.part = part


def _print(certificate: Certificate) -> None:
    verdict, reason = certificate.verdict()
    for check in certificate.checks():
        print(f"{check.state:5} {check.part:9} {check.name}: {one_line(check.detail, 300)}")
    if (smallest := certificate.smallest) is not None:
        print(f"\nSmallest example: {one_line(smallest.prompt, 300)!r}, max_tokens {smallest.fields['max_tokens']}")
        print(f"  speculative: {one_line(smallest.speculative)!r}\n  plain:       {one_line(smallest.plain)!r}")
    print(f"\n{verdict}: {one_line(reason, 600)}")
