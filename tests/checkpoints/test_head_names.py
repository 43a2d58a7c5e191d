"""Learned drafters by name: on the command line, for a target, and shipped with Paceline."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from paceline.checkpoints import head_fit
from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.head_fit import fingerprint, same_target, shipped_head
from paceline.checkpoints.head_write import write_head
from paceline.checkpoints.loader import Loaded
from paceline.cli import app
from paceline.drafters import factory as make
from paceline.drafters.factory import check_spec, make_drafter
from paceline.drafters.suffix import Suffix
from paceline.errors import HeadMismatch, InvalidOption, UnsupportedModel
from paceline.models.heads import AssistantConfig, ExitConfig, HeadConfig
from paceline.protocols import TargetWithHead
from paceline.testing import Oracle
from tests.support.random_heads import BLOCK, COMPACT, EAGLE, EAGLE3, EXIT, LAYER, MEDUSA, head_of, loaded


class Fake(Suffix):
    """Replaces every learned drafter, and records its arguments."""

    def __init__(self, config: HeadConfig, tensors: Any, target: TargetWithHead, **options: float) -> None:
        super().__init__()
        self.made, self.options = (config, dict(tensors), target), options


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fake_drafters")
    module.Fake = Fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_drafters", module)
    monkeypatch.setattr(make, "_CLASSES", dict.fromkeys(make._CLASSES, "fake_drafters:Fake"))


def refuse(reference: str) -> Loaded:
    raise AssertionError(reference)


def made(spec: str, target: Loaded) -> Fake:
    drafter = make_drafter(spec, target, refuse)
    assert isinstance(drafter, Fake)
    return drafter


@pytest.mark.parametrize(
    ("name", "config"), [("eagle3", EAGLE3), ("medusa", COMPACT), ("block", BLOCK), ("early-exit", EXIT)]
)
def test_a_name_with_a_folder_makes_its_drafter(name: str, config: HeadConfig, tmp_path: Path) -> None:
    folder = tmp_path / "a+model:b@c"
    folder.parent.mkdir(exist_ok=True)
    write_head(folder, head_of(config))
    target = loaded()
    for spec in (f"{name}:{folder}", f"head:{folder}"):
        got, tensors, given = made(spec, target).made
        assert (got, given) == (config, target.target)
        assert set(tensors) >= set(head_of(config).tensors)
    stack: Any = make_drafter(f"ngram + {name}:{folder}", target, refuse)
    assert [type(drafter).__name__ for drafter in stack._drafters] == ["NGram", "Fake"]


def test_default_taps_come_from_the_target(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", head_of(replace(EAGLE3, taps=())))
    assert made(f"eagle3:{folder}", loaded()).made[0] == EAGLE3


def test_the_wrong_kind_under_a_name_is_an_error(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", head_of(EAGLE3))
    with pytest.raises(HeadMismatch, match=r"holds a head of kind eagle3, not medusa. Use head:"):
        make_drafter(f"medusa:{folder}", loaded(), refuse)


def test_early_exit_takes_a_number_of_layers() -> None:
    target = loaded()
    assert made("early-exit:3", target).made == (ExitConfig(32, 3), {}, target.target)
    assert made("early-exit", target).made[0] == ExitConfig(32, 4)
    stack: Any = make_drafter("early-exit:3+suffix", target, refuse)
    assert [type(drafter).__name__ for drafter in stack._drafters] == ["Fake", "Suffix"]
    for layers in (0, 8):
        with pytest.raises(InvalidOption, match=rf"early-exit:{layers} .* 8 layers\. Use 1 to 7"):
            make_drafter(f"early-exit:{layers}", target, refuse)


def test_early_exit_takes_a_threshold(tmp_path: Path) -> None:
    target, folder = loaded(), write_head(tmp_path / "exit", head_of(EXIT))
    for spec, layers in (("early-exit:3", 3), ("early-exit", 4), (f"early-exit:{folder}", EXIT.layers)):
        drafter = made(f"{spec}@0.25", target)
        assert (drafter.made[0], drafter.options) == (
            replace(made(spec, target).made[0], layers=layers),
            {"threshold": 0.25},
        )
        assert made(spec, target).options == {}
    stack: Any = make_drafter("early-exit:3@.7+suffix", target, refuse)
    assert stack._drafters[0].options == {"threshold": 0.7}
    with pytest.raises(InvalidOption, match=r"threshold of 'early-exit:3@1\.5' must be 0 to 1"):
        check_spec("early-exit:3@1.5+ngram")


@pytest.mark.parametrize(
    "spec", ["eagle3", "mtp", "mtp:a", "medusa", "early-exit", "early-exit:4+ngram", "head:a", "eagle3:a+b:c@d"]
)
def test_names_that_there_are(spec: str) -> None:
    check_spec(spec)
    with pytest.raises(InvalidOption, match="no drafter is called 'nothing'"):
        check_spec(f"nothing+{spec}")


@pytest.mark.parametrize("spec", ["eagle", "eagle3:", "head", "head:", "model", "suffix+medusa:", "ngram:x"])
def test_names_that_there_are_not(spec: str) -> None:
    with pytest.raises(InvalidOption, match=r"no drafter is called .*eagle3:REF"):
        check_spec(spec)


def test_every_kind_has_its_drafter() -> None:
    from paceline.models.heads import kind_of

    mtp, parallel = replace(EAGLE, built_in=True), replace(EAGLE3, mask_token=1)
    assistant = AssistantConfig(LAYER, 32)
    assert {kind_of(c) for c in (EAGLE3, parallel, EAGLE, mtp, MEDUSA, BLOCK, EXIT, assistant)} == set(make._CLASSES)


def test_a_target_that_lends_nothing_is_told(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", head_of(EXIT))
    target = replace(loaded(), target=Oracle([1], 1.0, 64))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModel, match="runs as a Oracle, which cannot lend its embedding"):
        make_drafter(f"head:{folder}", target, refuse)


# --- What comes with Paceline


def test_a_fingerprint_is_of_the_model_and_not_of_its_dtype() -> None:
    mine = fingerprint(loaded())
    assert mine == fingerprint(loaded(dtype=torch.bfloat16))
    assert same_target(mine, fingerprint(loaded(noise=0.02)))
    assert mine != fingerprint(loaded(noise=0.02))
    for other in (loaded(seed=1), loaded(word="v"), loaded(noise=2.0)):
        assert not same_target(mine, fingerprint(other))


def test_a_bare_name_is_the_head_that_comes_with_paceline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_fit, "SHIPPED_HEADS", tmp_path)
    target = loaded()
    assert shipped_head("eagle3", target) is None
    with pytest.raises(InvalidOption, match="no eagle3 head for toy comes with Paceline"):
        make_drafter("eagle3", target, refuse)
    heads: dict[str, HeadConfig] = {"a": EAGLE3, "b": COMPACT, "c": EXIT}
    for name, config in heads.items():
        head = replace(head_of(config), extra={"fingerprint": fingerprint(target)})
        write_head(tmp_path / name, head)
    assert shipped_head("eagle3", target) == tmp_path / "a"
    assert shipped_head("block", target) is None
    assert [made(name, target).made[0] for name in ("eagle3", "medusa", "early-exit")] == [EAGLE3, COMPACT, EXIT]
    assert shipped_head("eagle3", loaded(dtype=torch.bfloat16)) == tmp_path / "a"
    assert shipped_head("eagle3", loaded(seed=1)) is None
    assert made(f"eagle3:{tmp_path / 'a'}", loaded(seed=1)).made[0] == EAGLE3


# --- paceline info


def info(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["info", *arguments], env={"COLUMNS": "200"})


def test_info_tells_what_a_head_expects(tmp_path: Path) -> None:
    folder = str(write_head(tmp_path / "head", head_of(EAGLE3, torch.bfloat16)))
    facts = json.loads(info(folder, "--json").stdout)
    head = open_head(folder)
    size = (head.path / "model.safetensors").stat().st_size
    assert {key: facts[key] for key in ("head", "layout", "target", "target_layers", "taps", "bytes")} == {
        "head": "eagle3",
        "layout": "speculators",
        "target": "owner/name",
        "target_layers": 8,
        "taps": [2, 4, 5],
        "bytes": size,
    }
    assert (facts["hidden"], facts["vocab_size"], facts["draft_vocab"]) == (32, 64, 16)
    assert facts["extra"]["acceptance"] == {"code": 2.5, "chat": 2.0}
    table = info(folder).stdout
    for word in (
        "EAGLE-3, speculators layout",
        "owner/name, of 8 layers",
        "2, 4, 5",
        "16, 97 % of",
        "code 2.5, chat 2",
    ):
        assert word in table, word


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(EAGLE3, taps=()), ["2, L // 2, L - 3"]),
        (COMPACT, ["Medusa, paceline layout", "3 of 1 layers, with the target's output head"]),
        (BLOCK, ["DFlash", "4 tokens, 2 layers, mask token 63"]),
        (EXIT, ["after 3 layers, projection of rank 4"]),
    ],
)
def test_info_of_every_kind(config: HeadConfig, words: list[str], tmp_path: Path) -> None:
    write_head(tmp_path / "head", head_of(config))
    table = info(str(tmp_path / "head")).stdout
    assert all(word in table for word in words), table


def test_info_of_a_damaged_head_is_one_line(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", head_of(EXIT))
    (folder / "model.safetensors").write_bytes(b"nothing")
    result = info(str(folder))
    assert result.exit_code == 1
    assert "damaged or cut off" in result.stderr
    assert result.stderr.count("\n") == 1
