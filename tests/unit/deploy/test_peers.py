"""Why other systems' tests fail: each reason is of a file that is run, and users see it."""

from collections import Counter
from pathlib import Path

import pytest

from tests.peers.run import reasons_of
from tests.peers.suites import SUITES, Suite

PAGE = (Path(__file__).parents[3] / "docs/clients.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_reasons_are_of_files_that_are_run_and_are_on_the_page(suite: Suite) -> None:
    reasons = reasons_of(suite)
    files = {file for group in suite.groups for file in group.files}
    assert {case.partition("::")[0] for case in reasons} <= files
    for reason, count in Counter(reasons.values()).items():
        assert f"| {count} | {reason} |" in PAGE
