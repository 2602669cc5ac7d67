"""What is a path of this machine, what a URL, and which URLs are refused before anything is written."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.location import RemotePath, absolute, locate


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("runs/1", "runs/1"),
        ("/runs/1", "/runs/1"),
        ("file:///runs/1", "/runs/1"),
        ("file://localhost/runs/1", "/runs/1"),
        ("local:///runs/1", "/runs/1"),
        (Path("/a b").as_uri(), "/a b"),
    ],
)
def test_a_file_url_is_a_plain_path(given, meant):
    assert locate(given) == Path(meant)
    assert absolute(given) == Path(os.path.abspath(meant))


@pytest.mark.parametrize(
    "url", ["memory://", "memory://a", "memory://a/b/", "MEMORY://a//"]
)
def test_urls_keep_their_text_but_for_the_last_slash(url):
    path = locate(url)
    assert isinstance(path, RemotePath)
    assert (
        str(path)
        == os.fspath(path)
        == (url if url.endswith("://") else url.rstrip("/"))
    )
    assert locate(path) is path
    assert locate(str(path)) == pickle.loads(pickle.dumps(path)) == path
    assert path / "x" / "y" == locate(
        f"{str(path).removesuffix('/') if not url.endswith('://') else path}/x/y".replace(
            ":///", "://"
        )
    )
    assert (path / "x").parent == path
    assert (path / "x").with_name("y") == path / "y"


def test_an_unknown_protocol_is_refused_with_the_one_that_was_meant():
    with pytest.raises(
        ConfigurationError,
        match=r"memori:// is an unknown storage protocol\n.*\n.*did you mean 'memory'",
    ):
        locate("memori://bucket/run")
    with pytest.raises(
        ConfigurationError, match="s4:// is an unknown storage protocol"
    ):
        locate("s4://bucket/run")


def test_a_package_that_is_missing_is_named(monkeypatch):
    from fsspec.registry import known_implementations

    entry = {
        "class": "nowhere_fs.core.NowhereFileSystem",
        "err": "Install nowhere_fs to access Nowhere",
    }
    monkeypatch.setitem(known_implementations, "nowhere", entry)
    with pytest.raises(ConfigurationError) as caught:
        locate("nowhere://bucket/run")
    assert caught.value.problem == "the package for nowhere:// is not installed"
    assert (
        caught.value.found
        == "nowhere://bucket/run: Install nowhere_fs to access Nowhere"
    )
    assert caught.value.fix == "pip install nowhere_fs"


def test_a_password_is_refused_and_not_repeated():
    with pytest.raises(ConfigurationError, match="a password in a URL") as caught:
        locate("ftp://me:hunter2@host/run")
    assert "hunter2" not in str(caught.value)
    assert "me:***@host" in str(caught.value)


@pytest.mark.parametrize("url", ["simplecache::memory://a", "://a"])
def test_urls_without_one_storage_are_refused(url):
    with pytest.raises(ConfigurationError, match="this URL cannot be parsed"):
        locate(url)


def test_a_file_url_with_a_host_is_refused():
    with pytest.raises(
        ConfigurationError, match="absolute path of this machine"
    ) as caught:
        locate("file://runs/1")
    assert caught.value.fix == "file:///runs/1"


def test_a_failed_upload_is_an_oserror_and_leaves_no_file_open(monkeypatch):
    import fsspec

    storage = fsspec.filesystem("memory")
    locate("memory://here/file").write_chunks([b"12", b"3"])
    assert locate("memory://here/file").read_bytes() == b"123"

    def chunks():
        yield b"1"
        raise KeyError("of whoever writes")

    with pytest.raises(KeyError):
        locate("memory://here/file").write_chunks(chunks())

    class Broken:
        def write(self, chunk):
            raise RuntimeError("reset by peer")

        def discard(self):
            self.discarded = True

        def close(self):
            self.closed = True

    broken = Broken()
    monkeypatch.setattr(type(storage), "open", lambda self, path, mode: broken)
    with pytest.raises(OSError, match="RuntimeError: reset by peer"):
        locate("memory://here/file").write_chunks([b"1"])
    assert broken.discarded
    assert broken.closed
    storage.store.clear()
    storage.pseudo_dirs[:] = [""]
