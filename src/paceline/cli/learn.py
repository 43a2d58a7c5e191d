"""`paceline learn`: showing or deleting a folder of `serve --learn`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.commands import option
from paceline.cli.options import AsJson
from paceline.errors import InvalidOption


def learn(
    status: Annotated[Path | None, option("Show what was learned in this folder.", metavar="DIR")] = None,
    forget: Annotated[
        Path | None, option("Delete this folder: recorded traffic, memories and heads.", metavar="DIR")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show or delete what a server with --learn has learned.

    Stop the server before you delete its folder.
    """
    if (status is None) == (forget is None):
        raise InvalidOption("give --status DIR or --forget DIR", "Name the folder that `paceline serve --learn` uses")
    if forget is not None:
        from paceline.learn.folder import delete_folder

        delete_folder(forget)
        typer.echo(f"{forget} was deleted")
    else:
        assert status is not None
        _show(status, as_json)


def _show(folder: Path, as_json: bool) -> None:
    """Print one line for each API key."""
    import json

    from paceline.cli.show import amount
    from paceline.files.jsonl import older_file
    from paceline.learn.folder import describe_status, key_folders

    for key_folder in key_folders(folder):
        files = [path for path in (older_file(key_folder.traffic), key_folder.traffic) if path.exists()]
        size, state = sum(path.stat().st_size for path in files), key_folder.status()
        if as_json:
            training = key_folder.training_data.exists()
            typer.echo(json.dumps({"key": key_folder.path.name, "traffic": size, "training": training, "last": state}))
        else:
            training_line = "; training a head" if key_folder.training_data.exists() else ""
            typer.echo(
                f"{key_folder.path.name}: {amount(size, 'bytes')} of traffic; {describe_status(state)}{training_line}"
            )
