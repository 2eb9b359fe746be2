"""Foreign files read in place: the same numbers as after an import, whichever way they are sliced."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sigmasolver.data import formats
from sigmasolver.data.formats import Reading, import_data, open_data, opened
from sigmasolver.data.split import Split
from sigmasolver.recipes import recipe_of

VALUES = np.random.default_rng(3).normal(size=(5, 7, 6, 4)).astype(np.float32)


@pytest.fixture(params=["frames", "whole trajectories"])
def source(tmp_path, monkeypatch, request):
    """A kind that is read in place: the user's arrays, with a split of their own."""
    np.savez(tmp_path / "waves.npz", u=VALUES, v=2 * VALUES)

    def read(path):
        found = formats._read_own(path)
        one = (lambda index, start, stop: found.read(index, index + 1)[0, start:stop]) if by_frame else None
        return replace(found, frames=one, split=Split((0, 3), (4,), (1, 2)))

    by_frame = request.param == "frames"
    kind = formats.Kind("here", "a test", lambda path: path.suffix == ".npz", read, in_place=True)
    monkeypatch.setattr(formats, "KINDS", (kind, *formats.KINDS))
    return tmp_path / "waves.npz"


@pytest.mark.parametrize(
    "key",
    [2, -1, slice(1, 4), (1, 3), (1, slice(0, 5, 2)), (2, slice(None), slice(None, None, 3), 1, 0), slice(4, 1, -2)],
)
def test_slices_are_those_of_the_array(source, key):
    with open_data(source) as data:
        assert data.shape == (5, 7, 6, 4, 2)
        np.testing.assert_array_equal(data[key], np.stack([VALUES, 2 * VALUES], axis=-1)[key])


def test_the_split_of_the_data_set_holds_in_place_and_after_the_import(source, tmp_path):
    import_data(source, tmp_path / "store.h5")
    for path in (source, tmp_path / "store.h5"):
        with open_data(path) as data:
            assert recipe_of("ns2d").split_of(data) == Split((0, 3), (4,), (1, 2))


def test_a_changed_file_has_another_fingerprint(source):
    with open_data(source) as data:
        before, digests = data.fingerprint, data.digests
        assert len(set(digests)) == 5
    np.savez(source, u=VALUES, v=3 * VALUES)
    with open_data(source) as data:
        assert data.fingerprint != before and not set(data.digests) & set(digests)


def test_it_opens_again_after_it_was_closed(source):
    data = open_data(source)
    data.close()
    np.testing.assert_array_equal(data[1, 2, :, :, 0], VALUES[1, 2])
    with pytest.raises(IndexError):
        data[1, 2, 3, 4, 0, 0]


def test_data_are_read_in_place_unless_the_user_says_more_of_them(source):
    with opened(source, Reading()) as data:
        assert data.path == source and data.header.layout.boundary == ("open", "open")
        values = data[:]
    with opened(source, Reading(fields=("u", "v"), boundary=("periodic", "wall"), dt=0.5)) as data:
        assert data.path != source and data.path.exists()
        assert data.header.layout.boundary == ("periodic", "wall") and data.header.layout.times[1] == 0.5
        np.testing.assert_array_equal(data[:], values)
        temporary = data.path
    assert not temporary.exists()


def test_a_split_of_their_own_survives_what_is_skipped(source, tmp_path):
    spoilt = VALUES.copy()
    spoilt[3, 2, 1, 1] = np.nan
    np.savez(source, u=spoilt, v=VALUES)
    done = import_data(source, tmp_path / "store.h5", reading=Reading(skip_bad=True))
    with open_data(tmp_path / "store.h5") as data:
        assert len(data) == done.count == 4 and data.published_split == Split((0,), (3,), (1, 2))
        np.testing.assert_array_equal(data[3][..., 1], VALUES[4])
        assert data.header.parameters["skipped"] == ["trajectory 3"]
