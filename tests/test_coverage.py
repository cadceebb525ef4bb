"""COVERAGE.md says what the op tables say."""

from tests import coverage


def test_coverage_is_up_to_date():
    assert coverage.PATH.read_text() == coverage.document(), "stale: python tests/coverage.py --write"


def test_few_ops_run_on_the_host():
    host = [name for name, _, how, *_ in coverage.rows() if how == "fallback"]
    assert len(host) < 15, host
