"""Files written in one step."""

import pytest

from flwr_hetero.files import drafted, replace


@pytest.mark.parametrize("target", ["there", "nowhere"])
def test_a_link_in_the_way_is_not_followed(tmp_path, target):
    (tmp_path / "there").write_text("mine")
    (tmp_path / "page.html.draft").symlink_to(tmp_path / target)
    (tmp_path / "page.html").symlink_to(tmp_path / target)
    replace(tmp_path / "page.html", b"page")
    assert (tmp_path / "there").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()
    assert (tmp_path / "page.html").read_bytes() == b"page"
    assert not (tmp_path / "page.html").is_symlink()


def test_a_link_that_comes_in_between_is_an_error(tmp_path, monkeypatch):
    """Someone puts the link back between the two steps."""
    (tmp_path / "there").write_text("mine")
    draft = tmp_path / "page.html.draft"
    monkeypatch.setattr(type(draft), "unlink", lambda path, **_: path.symlink_to("there"))
    with pytest.raises(FileExistsError):
        replace(tmp_path / "page.html", b"page")
    assert (tmp_path / "there").read_text() == "mine"


def test_a_crash_leaves_the_old_file_and_its_draft_is_no_obstacle(tmp_path):
    path = tmp_path / "state"
    replace(path, b"old")

    def crash():
        with drafted(path, tmp_path / "before") as file:
            file.write(b"half")
            raise OSError(28, "disk full")

    with pytest.raises(OSError, match="disk full"):
        crash()
    assert path.read_bytes() == b"old"
    assert not (tmp_path / "before").exists()
    with drafted(path, tmp_path / "before") as file:
        file.write(b"new")
    assert (path.read_bytes(), (tmp_path / "before").read_bytes()) == (b"new", b"old")
    assert len([*tmp_path.iterdir()]) == 2
