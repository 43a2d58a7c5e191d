"""`paceline pull`, `list` and `rm`: models on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.commands import option
from paceline.cli.options import AllowPickle, AsJson, Quiet, Revision, Token
from paceline.cli.show import amount

if TYPE_CHECKING:
    from paceline.files.stores import StoredModel

Name = Annotated[str, typer.Argument(metavar="MODEL", help="Name of a model.", show_default=False)]


def pull(
    name: Name,
    *,
    revision: Revision = None,
    token: Token = None,
    allow_pickle: AllowPickle = False,
    quiet: Quiet = False,
) -> None:
    """Download a model from the Hugging Face hub.

    MODEL is a short name (qwen3:0.6b) or a hub id (owner/name). To get a GGUF file other than Q4_K_M, add its
    quantisation after a colon (qwen3:0.6b:Q8_0, owner/name:Q8_0). An interrupted download continues where it stopped.
    If the model is already on this machine, it is updated.
    """
    from paceline.files.hub import hub_model
    from paceline.files.locate import resolve
    from paceline.files.names import hub_name

    more = {"revision": revision, "token": token, "quiet": quiet, "allow_pickle": allow_pickle}
    hub = hub_name(name)
    path = hub_model(*hub, newest=True, **more) if hub else resolve(name, **more)  # type: ignore[arg-type]
    if not quiet:
        typer.echo(f"{path}\nChat with it: paceline run {name}", err=True)


def list_models(
    *,
    everything: Annotated[bool, option("Include models of Ollama and LM Studio.", "--all", "-a")] = False,
    as_json: AsJson = False,
) -> None:
    """List the models on this machine.

    These are models that Paceline has downloaded, and models in the cache of Hugging Face's libraries. Use the names as
    MODEL in any command.
    """
    from paceline.files.stores import stored_models

    models = stored_models(everything)
    if as_json:
        typer.echo(json.dumps([model._asdict() | {"path": str(model.path)} for model in models]))
        return
    if not models:
        typer.echo("There is no model on this machine. Download one: paceline pull qwen3:0.6b", err=True)
    widths = [max((len(text) for text in column), default=0) for column in zip(*map(_row, models), strict=True)]
    for model in models:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(_row(model), widths, strict=True)).rstrip())


def _row(model: StoredModel) -> tuple[str, str, str]:
    return model.name, amount(model.size, "bytes"), model.store


def rm(name: Name) -> None:
    """Delete a model from this machine."""
    from paceline.files.stores import find_model, remove_model

    model = find_model(name)
    remove_model(model)
    typer.echo(f"Deleted {model.name}, {amount(model.size, 'bytes')}.", err=True)
