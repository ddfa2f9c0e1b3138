"""A certificate says what it is of, and what it found."""

import json

import pytest

from megafrontier.certify.certificate import (
    FILE_NAME,
    Certificate,
    Finding,
    describe_certificate,
    hash_of_code,
    hash_of_config,
    versions,
    worst,
)
from megafrontier.config import load_config

pytestmark = pytest.mark.fast


def made(config, *findings):
    hashes = hash_of_config(config), hash_of_code()
    return Certificate("run", 8, *hashes, versions(), "2026-11-28T00:00:00+00:00", [*findings])


def test_the_worst_finding_of_a_promise_counts():
    good, near = Finding.within("p", 1e-9, 1e-5), Finding.within("p", 9e-6, 1e-5)
    bad = Finding.within("p", float("nan"), 1e-5)
    assert bad.status == "broken"
    assert worst([good, near]) == near
    assert worst([good, bad, near]) is bad


def test_a_figure_that_is_not_finite_is_json(tmp_path):
    certificate = made(load_config("quickstart"), Finding.within("p", float("inf"), 1e-5))
    certificate.write(tmp_path / FILE_NAME)
    assert json.loads((tmp_path / FILE_NAME).read_text())["findings"][0]["figure"] == "inf"


def test_the_line_of_a_run_says_whether_its_certificate_is_that_of_config_code_and_ranks(tmp_path):
    config = load_config("quickstart")
    assert "none" in describe_certificate(tmp_path, config, 8)
    made(config, Finding.within("losses", 0.0, 1e-5)).write(tmp_path / FILE_NAME)
    assert "every promise that was tried holds" in describe_certificate(tmp_path, config, 8)
    assert "of another number of ranks" in describe_certificate(tmp_path, config, 4)
    other = load_config("quickstart", ["model.layers=3"])
    assert "of another config" in describe_certificate(tmp_path, other, 8)
    renamed = load_config("quickstart", ["run.name=other", "log.every=3"])
    assert "tried holds" in describe_certificate(tmp_path, renamed, 8)
    made(config, Finding.within("losses", 1.0, 1e-5)).write(tmp_path / FILE_NAME)
    assert "BROKEN: losses" in describe_certificate(tmp_path, config, 8)
    (tmp_path / FILE_NAME).write_text("[]")
    assert "not readable" in describe_certificate(tmp_path, config, 8)
