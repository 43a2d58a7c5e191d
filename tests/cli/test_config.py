"""The configuration file and PACELINE_MODEL. The command line overrides both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.toy_cli import Shop, failure, run


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the expected path of the file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "paceline/config.toml"
    path.parent.mkdir()
    return path


def model_of(shop: Shop, *arguments: str) -> str:
    result = run("generate", "-n", "2", "--quiet", "hello", *arguments)
    assert result.exit_code == 0, result.output
    return str(shop.calls[-1]["model"])


def test_a_file_holds_options_by_command(shop: Shop, config: Path) -> None:
    config.write_text(
        'model = "a"\n[generate]\ndrafter = "ngram"\ntemperature = 0.5\nstop = ["x", "y"]\nallow-pickle = true\n'
    )
    assert model_of(shop) == "a"
    assert (shop.calls[-1]["drafter"], shop.calls[-1]["allow_pickle"]) == ("ngram", True)
    assert model_of(shop, "-m", "b", "-d", "none") == "b"
    assert shop.calls[-1]["drafter"] == "none"


def test_the_sections_of_chat_and_run(shop: Shop, config: Path) -> None:
    config.write_text('[chat]\nmodel = "a"\ndrafter = "ngram"\n[run]\nmodel = "b"\n')
    run("run", "-n", "2", stdin="hello\n")
    assert (shop.calls[-1]["model"], shop.calls[-1]["drafter"]) == ("b", "ngram")
    run("chat", "-n", "2", stdin="hello\n")
    assert shop.calls[-1]["model"] == "a"


def test_another_file(shop: Shop, config: Path, tmp_path: Path) -> None:
    config.write_text('model = "a"')
    other = tmp_path / "other.toml"
    other.write_text('model = "b"')
    assert run("--config", str(other), "generate", "-n", "2", "hello").exit_code == 0
    assert shop.calls[-1]["model"] == "b"
    assert "cannot be read: No such file" in failure(run("--config", str(tmp_path / "none.toml"), "generate", "hello"))


def test_the_environment_goes_before_the_file_and_after_the_command_line(
    shop: Shop, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text('model = "a"')
    monkeypatch.setenv("PACELINE_MODEL", "b")
    assert model_of(shop) == "b"
    assert model_of(shop, "-m", "c") == "c"
    run("chat", "d", "-n", "2", stdin="hello\n")
    assert shop.calls[-1]["model"] == "d", "MODEL too"
    assert "MODEL is d but --model is e" in failure(run("chat", "d", "-m", "e", stdin="hello\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle = 'a'", "no command has no option 'modle'"),
        ("[generate]\ndraftr = 'a'", "[generate] has no option 'draftr'. Did you mean drafter?"),
        ("[serv]\nport = 1", "there is no command 'serv'. Did you mean serve?"),
        ("[generate]\nmodel = ['a']", "model must be one value, got ['a']"),
        ("[generate]\nallow-pickle = 'yes'", "allow-pickle must be true or false, got 'yes'"),
        ("[generate]\nmodel = true", "model must be one value, got True"),
        ("[generate]\nstop = [[1]]", "stop must be a list of values"),
        ("[generate.x]\na = 1", "[generate] has no option 'x'"),
        ("model = ", "cannot be read: Invalid value"),
        ("x" * (1 << 20) + "x", "larger than 1 MiB"),
    ],
)
def test_mistakes_are_named(shop: Shop, config: Path, text: str, message: str) -> None:
    config.write_text(text)
    assert message in failure(run("generate", "hello"))


def test_a_value_that_the_option_does_not_take(shop: Shop, config: Path) -> None:
    config.write_text("[generate]\nmax-new-tokens = 'many'")
    result = run("generate", "hello")
    assert result.exit_code == 2
    assert "'--max-new-tokens'" in result.stderr
