"""The commands that run the tests omit no tests."""

from pathlib import Path

from tests.support.everything import parts

TESTS = Path(__file__).parent


def test_make_test_all_runs_every_test_file():
    paths = {Path(word) for part in parts() for word in part.command if word.startswith("tests/")}
    named = {path.parts[1] for path in paths}
    missing = {file.relative_to(TESTS).parts[0] for file in TESTS.rglob("test_*.py")} - named
    assert not missing
