"""Import of public data sets: small hand-written files arrive in the store with correct axes, times and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.io
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmasolver.data.formats import FORMATS, guess_format, import_data, read_history
from sigmasolver.data.formats.mat import read_darcy_pair
from sigmasolver.data.header import StoreError
from sigmasolver.data.store import Writer, open_store
from sigmasolver.recipes import recipe_of
from tests.data.test_own_data import CONTAINERS, U, V, one_sentence, save_npz
from tests.data.test_own_data import Save as SaveOwn
from tests.data.test_store import HEADER, store
from tests.data.test_store import values as stored_values

RANDOM = np.random.default_rng(0)


def save_mat73(path: Path, variables: dict[str, np.ndarray]) -> None:
    """Write MATLAB version 7.3: HDF5 after a user block of 512 bytes, all axes reversed."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, values in variables.items():
            file.create_dataset(name, data=values.transpose(), chunks=True, compression="gzip")
        file.create_group("#refs#")
    with open(path, "r+b") as handle:
        handle.write(b"MATLAB 7.3 MAT-file".ljust(512, b" "))


def save_mat5(path: Path, variables: dict[str, np.ndarray]) -> None:
    scipy.io.savemat(path, variables)


Save = Callable[[Path, dict[str, np.ndarray]], None]
SAVE = pytest.mark.parametrize("save", [save_mat5, save_mat73])


def navier_stokes(dtype: str = "float32") -> dict[str, np.ndarray]:
    u = RANDOM.standard_normal((5, 6, 4, 3)).astype(dtype)
    return {"u": u, "a": RANDOM.standard_normal((5, 6, 4)), "t": np.array([[1.0, 2.0, 3.0]])}


@SAVE
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fno_navier_stokes(tmp_path: Path, save: Save, dtype: str) -> None:
    variables = navier_stokes(dtype)
    save(tmp_path / "ns.mat", variables)
    imported = import_data(tmp_path / "ns.mat", tmp_path / "ns.h5")
    assert (imported.kind, imported.count, imported.present, imported.shape) == ("fno-ns", 5, 0, (3, 6, 4, 1))
    with open_store(tmp_path / "ns.h5") as store:
        for i, x, y, t in np.ndindex(5, 6, 4, 3):
            assert store[i, t, x, y, 0] == np.float32(variables["u"][i, x, y, t])
        layout = store.header.layout
        np.testing.assert_array_equal(layout.times, [1, 2, 3])
        np.testing.assert_allclose(layout.coordinates[1], [0, 0.25, 0.5, 0.75])
        assert layout.fields == ("vorticity",) and layout.boundary == ("periodic", "periodic")
        assert store.header.seed is None and store.header.parameters["file"] == "ns.mat"
        assert store.fingerprint == imported.fingerprint


@SAVE
def test_fno_darcy(tmp_path: Path, save: Save) -> None:
    coeff, sol = RANDOM.choice([3.0, 12.0], (4, 5, 5)), RANDOM.random((4, 5, 5))
    save(tmp_path / "darcy.mat", {"coeff": coeff, "sol": sol, "Kcoeff": coeff})
    assert import_data(tmp_path / "darcy.mat", tmp_path / "d.h5").kind == "fno-darcy"
    with open_store(tmp_path / "d.h5") as store:
        np.testing.assert_array_equal(store[:, 0], np.stack([coeff, sol], -1).astype(np.float32))
        np.testing.assert_allclose(store.header.layout.coordinates[0], [0.1, 0.3, 0.5, 0.7, 0.9])


PUBLIC = ("piececonst_r421_N1024_smooth1.mat", "piececonst_r421_N1024_smooth2.mat")


def darcy_file(path: Path, save: Save, count: int, grid: int = 3, first: int = 0) -> np.ndarray:
    """Write cases with coefficient `first` + i and half of it as pressure; return the expected trajectories."""
    cases = np.broadcast_to(first + np.arange(count)[:, None, None], (count, grid, grid)).astype(float)
    save(path, {"coeff": cases, "sol": cases / 2})
    return np.stack([cases, cases / 2], -1)[:, None].astype(np.float32)


@SAVE
@pytest.mark.parametrize("swapped", [False, True], ids=["in order", "swapped"])
def test_import_darcy_pair_gives_public_split(tmp_path: Path, save: Save, swapped: bool) -> None:
    """1,024 cases each; the recipe trains on the first 1,000 of smooth1 and tests on the first 200 of smooth2."""
    smooth1, smooth2 = (tmp_path / name for name in PUBLIC)
    train_cases, test_cases = darcy_file(smooth1, save, 1024), darcy_file(smooth2, save, 1024, first=5000)
    imported = import_data([smooth2, smooth1] if swapped else [smooth1, smooth2], tmp_path / "darcy.h5")
    assert (imported.kind, imported.count, imported.shape) == ("fno-darcy", 1200, (1, 3, 3, 2))
    assert imported.notes[1] == (
        f"By their names: trajectories 0 to 999 are the first 1000 cases of {PUBLIC[0]} (training), 1000 to 1199 the "
        f"first 200 of {PUBLIC[1]} (test)."
    )
    recipe = recipe_of("darcy")
    no_validation = replace(recipe, train=replace(recipe.train, validation=0.0))
    with open_store(tmp_path / "darcy.h5") as store:
        split = no_validation.split(len(store), store.digests)
        assert split.train == tuple(range(1000)) and split.test == tuple(range(1000, 1200))
        np.testing.assert_array_equal(store[0:1000], train_cases[:1000])
        np.testing.assert_array_equal(store[1000:1200], test_cases[:200])
        assert store.header.parameters["file"] == ", ".join(PUBLIC)


def test_import_darcy_pair_ignores_order_of_named_files(tmp_path: Path) -> None:
    files = [tmp_path / name for name in PUBLIC]
    darcy_file(files[0], save_mat5, 1000)
    darcy_file(files[1], save_mat73, 200, first=5000)
    first = import_data(files, tmp_path / "first.h5")
    swapped = import_data(files[::-1], tmp_path / "swapped.h5")
    assert swapped.fingerprint == first.fingerprint and swapped.notes == first.notes
    assert (tmp_path / "first.h5").read_bytes() == (tmp_path / "swapped.h5").read_bytes()
    assert import_data(files[::-1], tmp_path / "first.h5").present == 1200


@SAVE
@pytest.mark.parametrize(
    ("names", "first", "how"),
    [
        (("a.mat", "b.mat"), 0, "By the order of the files"),
        (("b.mat", "a.mat"), 0, "By the order of the files"),
        (("darcy_Smooth2.mat", "other.mat"), 1, "By their names"),
        (("other.mat", "darcy_smooth1.mat"), 1, "By their names"),
        (("other.mat", "darcy_smooth2.mat"), 0, "By their names"),
        (("smooth12.mat", "b.mat"), 0, "By the order of the files"),
    ],
)
def test_read_darcy_pair_identifies_training_file(
    tmp_path: Path, save: Save, names: tuple[str, str], first: int, how: str
) -> None:
    paths = [tmp_path / name for name in names]
    values = [darcy_file(path, save, 4, first=100 * number) for number, path in enumerate(paths)]
    pair = read_darcy_pair(paths, 3, 2)
    assert pair.count == 5 and pair.files == (paths[first], paths[1 - first])
    assert pair.notes[-1].startswith(f"{how}: trajectories 0 to 2 are the first 3 cases of {names[first]} (training)")
    expected = np.concatenate([values[first][:3], values[1 - first][:2]])
    for start in range(5):
        for stop in range(start + 1, 6):
            np.testing.assert_array_equal(pair.read(start, stop), expected[start:stop])


def test_import_single_darcy_file_notes_its_split(tmp_path: Path) -> None:
    values = darcy_file(tmp_path / PUBLIC[0], save_mat5, 7)
    imported = import_data(tmp_path / PUBLIC[0], tmp_path / "one.h5")
    assert imported.count == 7 and "test splits come from this one file" in imported.notes[-1]
    np.testing.assert_array_equal(open_store(tmp_path / "one.h5")[:], values)
    as_list = import_data([tmp_path / PUBLIC[0]], tmp_path / "listed.h5")
    assert as_list.fingerprint == imported.fingerprint


def test_import_darcy_pair_rejects_invalid_files(tmp_path: Path) -> None:
    smooth1, smooth2 = (tmp_path / name for name in PUBLIC)
    darcy_file(smooth1, save_mat5, 1000)
    darcy_file(smooth2, save_mat73, 200)
    few, coarse, third = (tmp_path / name for name in ("few.mat", "coarse_smooth2.mat", "third.mat"))
    darcy_file(few, save_mat5, 199)
    darcy_file(coarse, save_mat73, 200, grid=2)
    darcy_file(third, save_mat5, 200)
    save_mat5(tmp_path / "ns.mat", navier_stokes())
    np.save(tmp_path / "own.npy", np.zeros((2, 3, 4, 5)))
    (tmp_path / "smooth1").mkdir()
    other_smooth1 = tmp_path / "smooth1" / PUBLIC[0]
    darcy_file(other_smooth1, save_mat5, 1000)
    cut_5, cut_73 = tmp_path / "cut5_smooth1.mat", tmp_path / "cut73_smooth2.mat"
    cut_5.write_bytes(smooth1.read_bytes()[:-1000])
    cut_73.write_bytes(smooth2.read_bytes()[:-1000])
    for sources, message in (
        ([smooth1, few], r"few.mat has 199 cases, but the test split needs the first 200; give the complete file"),
        ([third, smooth2], r"third.mat has 200 cases, but the training split needs the first 1000"),
        ([smooth1, coarse], r"smooth1.mat has a 3 × 3 grid, but .*coarse_smooth2.mat has 2 × 2"),
        ([smooth1, smooth1], "was given twice"),
        ([smooth1, other_smooth1], "are both smooth1"),
        ([smooth1, smooth2, third], "Got 3 Darcy files; expected one, or two"),
        ([cut_5, smooth2], "cut5_smooth1.mat is truncated or is not a MATLAB file; copy or download it again"),
        ([smooth1, cut_73], "cut73_smooth2.mat is truncated or is not a MATLAB file; copy or download it again"),
        ([smooth1, tmp_path / "ns.mat"], "Only fno-darcy files can be imported together, not fno-darcy, fno-ns"),
        ([tmp_path / "own.npy"] * 2, "Only fno-darcy files can be imported together, not arrays"),
        ([smooth1, tmp_path / "none.mat"], "not found"),
        ([], "Nothing to import"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            import_data(sources, tmp_path / "out.h5")
        assert "\n" not in str(caught.value) and not (tmp_path / "out.h5").exists(), message
    with pytest.raises(ValueError, match="which defines its fields"):
        import_data([smooth1, smooth2], tmp_path / "out.h5", names=["u"])
    import_data([smooth1, smooth2], tmp_path / "out.h5")
    with pytest.raises(StoreError):
        import_data(smooth1, tmp_path / "out.h5")


def test_mat_versions_5_and_73_import_all_values(tmp_path: Path) -> None:
    for folder, save in (("5", save_mat5), ("73", save_mat73)):
        (tmp_path / folder).mkdir()
        variables = navier_stokes()
        save(tmp_path / folder / "ns.mat", variables)
        import_data(tmp_path / folder / "ns.mat", tmp_path / f"{folder}.h5")
        np.testing.assert_array_equal(
            open_store(tmp_path / f"{folder}.h5")[:, :, :, :, 0], np.moveaxis(variables["u"], -1, 1)
        )


def test_import_navier_stokes_without_times_assumes_frame_numbers(tmp_path: Path) -> None:
    save_mat5(tmp_path / "ns.mat", {"u": navier_stokes()["u"]})
    imported = import_data(tmp_path / "ns.mat", tmp_path / "ns.h5")
    assert any("No times" in note for note in imported.notes)
    np.testing.assert_array_equal(open_store(tmp_path / "ns.h5").header.layout.times, [1, 2, 3])


def test_import_kolmogorov(tmp_path: Path) -> None:
    values = RANDOM.standard_normal((3, 4, 8, 8)).astype(np.float32)
    np.save(tmp_path / "kf.npy", values)
    assert import_data(tmp_path / "kf.npy", tmp_path / "own.h5", names=["u"]).kind == "arrays"
    assert import_data(tmp_path / "kf.npy", tmp_path / "kf.h5", "factformer-kf2d").kind == "factformer-kf2d"
    with open_store(tmp_path / "kf.h5") as store:
        np.testing.assert_array_equal(store[:][..., 0], values)
        np.testing.assert_allclose(store.header.layout.times, 2 + np.array([1, 2, 3, 4]) / 32)
        np.testing.assert_allclose(store.header.layout.coordinates[0][-1], 2 * np.pi * 7 / 8)


def test_guess_format_kolmogorov_requires_published_grid(tmp_path: Path) -> None:
    for shape, kind in (((1, 2, 256, 256), "factformer-kf2d"), ((1, 2, 255, 255), "arrays"), ((1, 256, 256), "arrays")):
        np.save(tmp_path / "a.npy", np.zeros(shape, "f2"))
        assert guess_format(tmp_path / "a.npy").name == kind


def turbulence(folder: Path, names: tuple[str, ...] = ("iso_10", "iso_2", "iso_1")) -> dict[str, np.ndarray]:
    data = {}
    for name in names:
        (folder / name).mkdir(parents=True)
        data[name] = RANDOM.standard_normal((20, 4, 5, 6, 4)).astype(np.float32)
        for channel, field in enumerate(("prs", "vx", "vy", "vz")):
            np.save(folder / name / f"{field}.npy", data[name][..., channel])
    return data


def test_import_turbulence_sorts_by_name(tmp_path: Path) -> None:
    data = turbulence(tmp_path / "iso")
    (tmp_path / "iso" / "readme.txt").write_text("not a trajectory")
    assert import_data(tmp_path / "iso", tmp_path / "iso.h5").kind == "factformer-it3d"
    with open_store(tmp_path / "iso.h5") as store:
        np.testing.assert_array_equal(store[:], np.stack([data[name] for name in sorted(data)]))
        np.testing.assert_allclose(store.header.layout.times, np.linspace(0.05, 1, 20))
        assert store.header.layout.fields == ("pressure", "velocity_x", "velocity_y", "velocity_z")


def smoke(folder: Path, numbers: tuple[int, ...] = (10, 9, 100)) -> dict[int, np.ndarray]:
    folder.mkdir()
    data = {}
    for number in numbers:
        data[number] = RANDOM.random((3, 4, 4, 4, 4)).astype(np.float32)
        np.savez(folder / f"smoke_{number}.npz", fluid_field=data[number][..., :1], velocity=data[number][..., 1:])
    return data


def test_import_smoke_sorts_by_number(tmp_path: Path) -> None:
    data = smoke(tmp_path / "smoke")
    imported = import_data(tmp_path / "smoke", tmp_path / "smoke.h5")
    assert imported.kind == "factformer-smoke" and any("missing" in note for note in imported.notes)
    with open_store(tmp_path / "smoke.h5") as store:
        np.testing.assert_array_equal(store[:], np.stack([data[number] for number in (9, 10, 100)]))
        np.testing.assert_allclose(store.header.layout.times, [6.75, 7.5, 8.25])
        np.testing.assert_allclose(store.header.layout.coordinates[2], [1, 3, 5, 7])


def test_import_user_arrays(tmp_path: Path) -> None:
    fields = RANDOM.standard_normal((2, 3, 5, 2))
    times, x = np.array([0.0, 0.1, 0.5]), np.linspace(0, 1, 5)
    np.savez(tmp_path / "own.npz", fields=fields, names=np.array(["u", "v"]), times=times, x=x)
    imported = import_data(tmp_path / "own.npz", tmp_path / "own.h5")
    assert imported.kind == "arrays" and [note.split()[1] for note in imported.notes] == [
        "units:",
        "boundary:",
        "frames",
    ]
    with open_store(tmp_path / "own.h5") as store:
        np.testing.assert_array_equal(store[:], fields.astype(np.float32))
        assert store.header.layout.fields == ("u", "v") and store.header.layout.boundary == ("open",)
        np.testing.assert_array_equal(store.header.layout.times, times)
    np.save(tmp_path / "own.npy", RANDOM.random((2, 3, 4, 5, 1)))
    assert import_data(tmp_path / "own.npy", tmp_path / "npy.h5").shape == (3, 4, 5, 1)


def test_import_resumes_and_rejects_changed_source(tmp_path: Path) -> None:
    data = smoke(tmp_path / "smoke")
    first = import_data(tmp_path / "smoke", tmp_path / "a.h5")
    calls: list[tuple[int, int]] = []
    again = import_data(tmp_path / "smoke", tmp_path / "a.h5", progress=lambda *call: calls.append(call))
    assert (again.present, again.fingerprint, calls) == (len(data), first.fingerprint, [])
    np.savez(tmp_path / "smoke" / "smoke_200.npz", fluid_field=np.zeros(1), velocity=np.zeros(1))
    with pytest.raises(StoreError, match="cannot be resumed: its parameter bytes"):
        import_data(tmp_path / "smoke", tmp_path / "a.h5")


def test_public_layouts_match_simulators(tmp_path: Path) -> None:
    """Public files and simulated trajectories are interchangeable: same fields, units, boundaries and axes."""
    from sigmasolver.simulate.darcy import Darcy
    from sigmasolver.simulate.smoke import SMOKE3D
    from sigmasolver.simulate.turbulence import IT3D
    from sigmasolver.simulate.vorticity import KF2D, NS2D

    t, s = NS2D.layout.times, len(NS2D.layout.coordinates[0])
    save_mat5(tmp_path / "ns.mat", {"u": np.zeros((1, s, s, len(t)), "f4"), "t": t[None]})
    save_mat5(tmp_path / "darcy.mat", {"coeff": np.zeros((1, 421, 421)), "sol": np.zeros((1, 421, 421))})
    np.save(tmp_path / "kf.npy", np.zeros((1, 320, 256, 256), "f2"))
    for field in ("prs", "vx", "vy", "vz"):
        (tmp_path / "iso" / "0").mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "iso" / "0" / f"{field}.npy", np.zeros((20, 60, 60, 60), "f2"))
    (tmp_path / "smoke").mkdir()
    shape = (20, 64, 64, 64)
    np.savez_compressed(
        tmp_path / "smoke" / "smoke_0.npz",
        fluid_field=np.zeros((*shape, 1), "f2"),
        velocity=np.zeros((*shape, 3), "f2"),
    )
    rows = {row.name: row for row in FORMATS}
    for kind, name, simulator in (
        ("fno-ns", "ns.mat", NS2D),
        ("fno-darcy", "darcy.mat", Darcy()),
        ("factformer-kf2d", "kf.npy", KF2D),
        ("factformer-it3d", "iso", IT3D),
        ("factformer-smoke", "smoke", SMOKE3D),
    ):
        public, simulated = rows[kind].read(tmp_path / name).layout, simulator.layout
        assert (public.fields, public.units, public.boundary) == (
            simulated.fields,
            simulated.units,
            simulated.boundary,
        )
        for actual, expected in zip(
            (*public.coordinates, public.times), (*simulated.coordinates, simulated.times), strict=True
        ):
            np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


# --- invalid files


class Bomb:
    """Runs code when unpickled."""

    def __reduce__(self) -> tuple:
        return (print, ("boom",))


def bad_sources(folder: Path) -> dict[str, tuple[Path, str]]:
    ns = navier_stokes()
    save_mat5(folder / "nokey.mat", {"coeff": ns["a"]})
    save_mat5(folder / "shape.mat", {"u": ns["a"]})
    save_mat5(folder / "times.mat", {"u": ns["u"], "t": np.arange(7.0)})
    save_mat5(folder / "cell.mat", {"u": np.array([[1], "x"], dtype=object)})
    save_mat5(folder / "complex.mat", {"u": ns["u"] * 1j})
    save_mat5(folder / "differ.mat", {"coeff": ns["a"], "sol": ns["a"][:, :2]})
    with h5py.File(folder / "group.mat", "w") as file:
        file.create_group("u")
    (folder / "text.mat").write_text("hello")
    np.save(folder / "objects.npy", np.array([Bomb(), Bomb()], dtype=object), allow_pickle=True)
    np.savez(folder / "objects.npz", fields=np.array([Bomb()], dtype=object))
    np.save(folder / "flat.npy", np.zeros((3, 4)))
    (folder / "text.npy").write_text("hello")
    (folder / "text.npz").write_text("hello")
    np.savez(folder / "words.npz", fields=np.zeros((1, 2, 3, 1)), times=np.array(["a", "b"]))
    (folder / "empty").mkdir()
    turbulence(folder / "lacking", ("a", "b"))
    (folder / "lacking" / "b" / "vy.npy").unlink()
    turbulence(folder / "uneven", ("a", "b"))
    np.save(folder / "uneven" / "b" / "vz.npy", np.zeros((20, 4, 5, 7)))
    smoke(folder / "keys")
    np.savez(folder / "keys" / "smoke_9.npz", velocity=np.zeros((3, 4, 4, 4, 3)))
    smoke(folder / "sizes")
    density, velocity = np.zeros((3, 5, 4, 4, 1)), np.zeros((3, 5, 4, 4, 3))
    np.savez(folder / "sizes" / "smoke_100.npz", fluid_field=density, velocity=velocity)
    return {
        "nokey.mat": (folder / "nokey.mat", "is not in a supported format"),
        "shape.mat": (folder / "shape.mat", r"'u' in .* has shape \(5, 6, 4\)"),
        "times.mat": (folder / "times.mat", "3 frames of u but 7 times in t"),
        "cell.mat": (folder / "cell.mat", "expected real numbers"),
        "complex.mat": (folder / "complex.mat", "contains complex.* values; expected real numbers"),
        "differ.mat": (folder / "differ.mat", "coeff of shape .* but sol of"),
        "group.mat": (folder / "group.mat", "not a numeric array"),
        "text.mat": (folder / "text.mat", "is not a MATLAB file"),
        "objects.npy": (folder / "objects.npy", "pickled Python objects, which are never loaded"),
        "objects.npz": (folder / "objects.npz", "pickled Python objects, which are never loaded"),
        "flat.npy": (folder / "flat.npy", r"has shape \(3, 4\); expected axes \(count, frames, x"),
        "text.npy": (folder / "text.npy", "not a valid .npy file"),
        "text.npz": (folder / "text.npz", "truncated or corrupt"),
        "words.npz": (folder / "words.npz", "times of shape .* expected 2 numbers"),
        "empty": (folder / "empty", "not in a supported format"),
        "missing": (folder / "missing", "not found"),
        "lacking": (folder / "lacking", "vy.npy not found"),
        "uneven": (folder / "uneven", r"vz.npy has shape .* the first file has \(20, 4, 5, 6\)"),
        "keys": (folder / "keys", "no array 'fluid_field'; available arrays: velocity"),
        "sizes": (folder / "sizes", "smoke_100.npz has shape"),
    }


def test_import_rejects_invalid_public_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (source, message) in bad_sources(tmp_path).items():
        with pytest.raises(ValueError, match=message) as caught:
            import_data(source, tmp_path / "out" / f"{name}.h5")
        assert "\n" not in str(caught.value), name
    assert "boom" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", [row.name for row in FORMATS])
def test_import_rejects_wrong_kind(tmp_path: Path, kind: str) -> None:
    sources = bad_sources(tmp_path)
    for source in ("flat.npy", "text.mat", "text.npz", "empty", "objects.npy", "nokey.mat"):
        with pytest.raises(ValueError) as caught:
            import_data(sources[source][0], tmp_path / "out.h5", kind=kind)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="Unknown format 'nonsense'; choose from fno-darcy"):
        import_data(sources["flat.npy"][0], tmp_path / "out.h5", kind="nonsense")


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["five.mat", "seven.mat", "kf.npy", "own.npz"]),
    cut=st.floats(0, 1, exclude_max=True),
    noise=st.just(b"") | st.binary(max_size=60),
)
def test_import_rejects_truncated_and_corrupt_files(
    tmp_path_factory: pytest.TempPathFactory, name: str, cut: float, noise: bytes
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    variables = navier_stokes()
    u = variables["u"]
    save_mat5(folder / "five.mat", variables)
    save_mat73(folder / "seven.mat", variables)
    np.save(folder / "kf.npy", np.ones((2, 3, 4, 4), np.float32))
    np.savez(folder / "own.npz", fields=np.ones((2, 3, 4, 1)))
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(cut * len(content))] + noise)
    try:
        import_data(folder / name, folder / "out.h5")
        assert noise or name.endswith(".mat"), "a truncated NumPy file was accepted"
        if not noise:  # the cut then removed only variables that are not read
            np.testing.assert_array_equal(open_store(folder / "out.h5")[:][..., 0], np.moveaxis(u, -1, 1))
    except ValueError as error:
        assert "\n" not in str(error)


# --- read_history


@CONTAINERS
def test_read_history_from_every_format(tmp_path: Path, save: SaveOwn, suffix: str) -> None:
    both = np.stack([U, V], -1)
    swapped = both[..., ::-1]

    def check(source: Path, expected: np.ndarray, names: tuple[str, ...] = ("u", "v")) -> None:
        history = read_history(source, names, 2)
        assert history.dtype == np.float32 and history.shape == expected.shape
        np.testing.assert_array_equal(history, expected)

    np.save(tmp_path / "many.npy", both)
    np.save(tmp_path / "one.npy", both[0].astype(np.float64))
    np.save(tmp_path / "field.npy", U[0])
    np.save(tmp_path / "fields.npy", U)
    np.save(tmp_path / "last.npy", U[0][..., None])
    check(tmp_path / "many.npy", both)
    check(tmp_path / "one.npy", both[:1])
    check(tmp_path / "field.npy", U[:1, ..., None], ("u",))
    check(tmp_path / "fields.npy", U[..., None], ("u",))
    check(tmp_path / "last.npy", U[:1, ..., None], ("u",))
    check(save(tmp_path / f"a{suffix}", {"u": U, "v": V, "times": np.arange(3.0)}), swapped, ("v", "u"))
    check(save(tmp_path / f"b{suffix}", {"u": U[0], "v": V[0]}), swapped[:1], ("v", "u"))
    check(save(tmp_path / f"c{suffix}", {"fields": both}), both)
    check(save(tmp_path / f"d{suffix}", {"fields": both[0], "names": ["u", "v"]}), swapped[:1], ("v", "u"))


def test_read_history_from_store(tmp_path: Path) -> None:
    data = stored_values(3)
    path = store(tmp_path / "a.h5", data)
    np.testing.assert_array_equal(read_history(path, ["p", "u"], 2), data[..., ::-1])
    np.testing.assert_array_equal(read_history(path, ["p"], 2), data[..., 1:])
    with pytest.raises(ValueError, match="has no field 'q'; choose from u, p"):
        read_history(path, ["q"], 2)
    with pytest.raises(ValueError, match="has 2 spatial axes; expected 3"):
        read_history(path, ["u"], 3)
    Writer(tmp_path / "none.h5", HEADER, 2).close()
    with pytest.raises(ValueError, match="has no complete trajectory yet"):
        read_history(tmp_path / "none.h5", ["u"], 2)


def test_read_history_rejects_invalid_files(tmp_path: Path) -> None:
    both = np.stack([U, V], -1).astype(np.float64)
    np.save(tmp_path / "a.npy", both)
    both[1, 2, 3, 4, 1], both[3, 0, 0, 0, 0] = np.nan, 1e300
    np.save(tmp_path / "nan.npy", both)
    save_npz(tmp_path / "a.npz", {"u": U, "v": V[:, :2], "c": U * 1j})
    (tmp_path / "a.txt").write_text("")
    cases: list[tuple[str, list[str], int, str]] = [
        ("nan.npy", ["u", "v"], 2, r"2 values that are not finite .* trajectory 1, frame 2, point \(3, 4\) of 'v'"),
        ("a.npy", ["u"], 2, r"has 2 channels; expected 1, in the order u\."),
        ("a.npy", ["u", "v"], 1, r"has shape \(4, 3, 6, 5, 2\); expected axes \(frames, x, channels\)"),
        ("a.npz", ["u", "v"], 2, r"'v' in .* has shape .* all must agree"),
        ("a.npz", ["u", "w"], 2, "has no field 'w'; choose from u, v, c"),
        ("a.npz", ["c"], 2, "'c' in .* contains complex"),
        ("a.npz", ["u"], 1, r"'u' in .* has shape \(4, 3, 6, 5\); expected axes \(frames, x\)"),
        ("a.txt", ["u"], 2, "is not an array file"),
        ("missing.npy", ["u"], 2, "not found"),
        ("missing.h5", ["u"], 2, "not found"),
        ("a.npy", [], 2, "not a list of field names"),
    ]
    for name, names, axes, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            read_history(tmp_path / name, names, axes)
        assert one_sentence(caught.value), name
