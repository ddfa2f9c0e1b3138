"""Names are looked up in the hub if it answers, and only in the cache if it does not."""

import socket

import pytest
from huggingface_hub import constants, is_offline_mode

from megafrontier.data.hub import hub_lookup


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """A silent server in the place of the hub."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    return server


def test_only_the_cache_is_searched_if_the_hub_does_not_answer(hub) -> None:
    datasets = pytest.importorskip("datasets")
    kept = datasets.config.HF_HUB_OFFLINE
    hub.close()
    with hub_lookup("owner/name"):
        assert is_offline_mode()
        assert datasets.config.HF_HUB_OFFLINE
    assert not is_offline_mode()
    assert kept == datasets.config.HF_HUB_OFFLINE


def test_the_hub_is_asked_if_it_answers_or_there_is_a_proxy(hub, monkeypatch) -> None:
    with hub, hub_lookup("owner/name"):
        assert not is_offline_mode()
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    with hub_lookup("owner/name"):
        assert not is_offline_mode()


def test_a_folder_needs_no_hub(hub, tmp_path) -> None:
    hub.close()
    with hub_lookup(str(tmp_path)):
        assert not is_offline_mode()
