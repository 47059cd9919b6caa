"""A short seed of the chaos run: processes killed, frozen and replaced, the network broken."""

import pytest

from benchmarks.chaos.__main__ import main
from tests.e2e.headless import is_possible

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.skipif(not is_possible("127.240.0.53"), reason="needs mount namespaces and port 53")
def test_requests_end_as_they_should_whatever_fails(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--seed 5 --seconds 8 --clients 8 --questions 30 --rest 0.3 --pairs 0"
    status = main(words.split())
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert "answered" in shown
