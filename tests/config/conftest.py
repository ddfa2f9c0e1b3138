"""Config files that a test writes."""

import pytest


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


@pytest.fixture
def base(write):
    return write("base.yaml", "model: {layers: 2, hidden: 64, heads: 4}\n")
