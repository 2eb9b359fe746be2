"""Symmetries commute with the solvers, form a group, and are undone exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sigmasolver.simulate.darcy import Darcy
from sigmasolver.simulate.generate import header_of
from sigmasolver.simulate.smoke import Smoke
from sigmasolver.simulate.turbulence import Turbulence
from sigmasolver.simulate.vorticity import DEMO, KF2D, NS2D, Vorticity
from sigmasolver.symmetries import (
    SYMMETRIES,
    GridSymmetries,
    Isometry,
    SymmetryGroup,
    Translation,
    refuse_unsuitable,
    symmetries_of,
)
from sigmasolver.symmetries.maps import refuse_unknown_vectors
from sigmasolver.tasks import TASKS

FIELDS = {
    1: ("temperature",),
    2: ("vorticity", "temperature"),
    3: ("density", "velocity_x", "velocity_y", "velocity_z"),
}
GRIDS = {name: (16,) * group.axes if group.axes < 3 else (4,) * 3 for name, group in SYMMETRIES.items()}


def every_row(symmetries: GridSymmetries) -> torch.Tensor:
    """All symmetries of a grid."""
    sizes = (len(symmetries.group.isometries), *symmetries.counts())
    return torch.cartesian_prod(*(torch.arange(size) for size in sizes)).view(-1, len(sizes))


def some_rows(symmetries: GridSymmetries, seed: int = 0) -> torch.Tensor:
    """Every isometry once, with random translations."""
    rows = symmetries.random(len(symmetries.group.isometries), torch.Generator().manual_seed(seed))
    rows[:, 0] = torch.arange(len(rows))
    return rows


def moved_slowly(frames: np.ndarray, group: SymmetryGroup, fields: tuple[str, ...], row: list[int]) -> np.ndarray:
    """(g u)(x) = R u(A x + s) point by point, from the definition, for one sample (T, *grid, q)."""
    grid, isometry = frames.shape[1:-1], group.isometries[row[0]]
    A = np.array(isometry.matrix)
    s = np.zeros(len(grid))
    if group.periodic:
        s += np.array(isometry.shift or (0,) * len(grid)) * grid
        for count, translation in zip(row[1:], group.translations, strict=True):
            step = 1 if translation.parts is None else np.array(grid) / translation.parts
            s += count * step * np.array(translation.direction)
    R = np.eye(len(fields))
    if "vorticity" in fields:
        R[fields.index("vorticity"), fields.index("vorticity")] = np.linalg.det(A)
    if "velocity_x" in fields:
        first = fields.index("velocity_x")
        R[first : first + len(grid), first : first + len(grid)] = A.T
    result = np.empty_like(frames)
    for point in np.ndindex(*grid):
        if group.periodic:
            source = (A @ point + np.round(s)).astype(int) % grid
        else:  # about the centre of the box
            centre = (np.array(grid) - 1) / 2
            source = np.round(A @ (point - centre) + centre).astype(int)
        result[(slice(None), *point)] = frames[(slice(None), *source)] @ R.T
    return result


@pytest.mark.parametrize("name", SYMMETRIES)
def test_apply_parity_with_definition(name: str) -> None:
    group = SYMMETRIES[name]
    symmetries, fields = group.on(GRIDS[name]), FIELDS[group.axes]
    rows = some_rows(symmetries)
    frames = torch.randn(len(rows), 2, *GRIDS[name], len(fields), generator=torch.Generator().manual_seed(1))
    moved = symmetries.apply(frames, fields, rows)
    for sample, row in enumerate(rows.tolist()):
        expected = moved_slowly(frames[sample].double().numpy(), group, fields, row)
        np.testing.assert_array_equal(moved[sample].double().numpy(), expected)


@pytest.mark.parametrize("name", SYMMETRIES)
def test_undo_inverts_apply_bit_for_bit(name: str) -> None:
    group = SYMMETRIES[name]
    symmetries, fields = group.on(GRIDS[name]), FIELDS[group.axes]
    rows = some_rows(symmetries)
    frames = torch.randn(len(rows), 3, *GRIDS[name], len(fields), generator=torch.Generator().manual_seed(2))
    assert torch.equal(symmetries.undo(symmetries.apply(frames, fields, rows), fields, rows), frames)
    assert torch.equal(symmetries.apply(symmetries.undo(frames, fields, rows), fields, rows), frames)
    assert not torch.equal(symmetries.apply(frames, fields, rows), frames)


@pytest.mark.parametrize(
    ("name", "grid", "order"),
    [
        ("square", (5, 5), 8),
        ("kolmogorov-4", (8, 8), 8 * 4 * 4),
        ("kolmogorov-8", (16, 16), 16 * 8 * 4),
        ("diagonal-forcing", (8, 8), 8 * 4),
        ("periodic-square", (3, 3), 8 * 9),
        ("periodic-cube", (2, 2, 2), 48 * 8),
        ("upright-box", (3, 3, 3), 2),
    ],
)
def test_symmetries_are_closed_under_composition(name: str, grid: tuple[int, ...], order: int) -> None:
    symmetries = SYMMETRIES[name].on(grid)
    rows = every_row(symmetries)
    assert len(rows) == len(symmetries) == order
    fields = FIELDS[len(grid)]
    # A generic field is fixed by the identity alone, so its images identify the symmetries.
    generic = torch.randn(1, 1, *grid, len(fields), generator=torch.Generator().manual_seed(3))

    def images(frames: torch.Tensor) -> set[bytes]:
        moved = symmetries.apply(frames.expand(order, *frames.shape[1:]), fields, rows)
        return {sample.numpy().tobytes() for sample in moved + 0.0}  # without negative zeros

    every = images(generic)
    assert len(every) == order
    for row in rows[:: max(1, order // 40)]:
        assert images(symmetries.apply(generic, fields, row[None])) == every


@pytest.mark.parametrize(("task", "count"), [("darcy", 8), ("ns2d", 256), ("kf2d", 4096), ("it3d", 48 * 60**3)])
def test_number_of_symmetries_of_a_task(task: str, count: int) -> None:
    assert len(symmetries_of(TASKS[task]).on(TASKS[task].grid)) == count


def test_translations_repeat_after_their_number() -> None:
    diagonal = SymmetryGroup((Isometry(((1, 0), (0, 1))),), (Translation((1, 1)),), periodic=True).on((4, 6))
    assert diagonal.counts() == [12]
    fields = ("temperature",)
    frames = torch.randn(1, 1, 4, 6, 1, generator=torch.Generator().manual_seed(0))
    images = [diagonal.apply(frames, fields, torch.tensor([[0, number]])) for number in range(13)]
    assert torch.equal(images[12], frames) and all(not torch.equal(image, frames) for image in images[1:12])


def flow_commutes(flow: Vorticity, name: str) -> float:
    """Largest relative difference between evolving transformed fields and transforming evolved ones."""
    group = SYMMETRIES[name]
    fine, stored = group.on((flow.grid,) * 2), group.on((flow.stored,) * 2)
    rows = some_rows(fine)
    # The stored grid contains the same translations, by fewer points.
    stride = flow.grid // flow.stored
    for column, translation in enumerate(group.translations, start=1):
        if translation.parts is None:
            rows[:, column] = rows[:, column] // stride * stride
    coarse = rows.clone()
    for column, translation in enumerate(group.translations, start=1):
        if translation.parts is None:
            coarse[:, column] //= stride
    initial = flow.initial(0, [0]).expand(len(rows), -1, -1)
    fields = ("vorticity",)
    transformed = fine.apply(initial[:, None, ..., None], fields, rows)[:, 0, ..., 0]
    frames = flow.evolve(initial)[..., None]
    expected = stored.apply(frames, fields, coarse)
    actual = flow.evolve(transformed)[..., None]
    assert (frames[:, -1] - frames[:, 0]).norm() > 0.05 * frames[:, 0].norm()  # the flow moves
    return float((actual - expected).abs().amax() / expected.abs().amax())


@pytest.mark.parametrize(
    ("flow", "name"),
    [
        (replace(NS2D, grid=64, stored=32, frames=3, step=1e-2), "diagonal-forcing"),
        (replace(KF2D, grid=96, stored=48, frames=3, step=1 / 256, burn_in=0.25, interval=1 / 4), "kolmogorov-8"),
        (replace(DEMO, grid=48, stored=24, frames=3, step=1 / 192, burn_in=0.5, interval=1 / 4), "kolmogorov-4"),
    ],
)
def test_symmetries_commute_with_flow(flow: Vorticity, name: str) -> None:
    assert flow_commutes(replace(flow, precision="float64"), name) < 1e-9


def test_symmetry_of_other_forcing_does_not_commute() -> None:
    flow = replace(KF2D, grid=96, stored=48, frames=2, step=1 / 256, burn_in=0.25, interval=1 / 4, precision="float64")
    assert flow_commutes(flow, "kolmogorov-4") > 1e-2


FLOW_TASK = replace(TASKS["kf2d"], space_stride=1)


@pytest.mark.parametrize(
    ("flow", "fitting"), [(NS2D, "diagonal-forcing"), (KF2D, "kolmogorov-8"), (DEMO, "kolmogorov-4")]
)
def test_only_the_symmetries_of_the_forcing_are_accepted(flow: Vorticity, fitting: str) -> None:
    header = header_of(replace(flow, grid=64, stored=16), 0)
    for name in ("diagonal-forcing", "kolmogorov-8", "kolmogorov-4"):
        group = SYMMETRIES[name]
        # A flow with eight waves also has the shifts of one with four, but not its reflections.
        if name == fitting:
            refuse_unsuitable(group, FLOW_TASK, header, 1)
        else:
            with pytest.raises(ValueError, match=r"The forcing of these data .* does not have these symmetries"):
                refuse_unsuitable(group, FLOW_TASK, header, 1)
        refuse_unsuitable(group, FLOW_TASK, replace(header, source="measured"), 1)
    unforced = replace(flow, forcing_cosine=0.0, forcing_sine=0.0, grid=64, stored=16)
    refuse_unsuitable(SYMMETRIES["periodic-square"], FLOW_TASK, header_of(unforced, 0), 1)


def test_data_without_the_symmetries_are_refused() -> None:
    darcy, square = header_of(Darcy(grid=85), 0), SYMMETRIES["square"]
    refuse_unsuitable(square, TASKS["darcy"], darcy, 3)
    with pytest.raises(ValueError, match=r"points of axis x are not symmetric .*every 5 of 85"):
        refuse_unsuitable(square, TASKS["darcy"], darcy, 5)
    uneven = replace(darcy.layout, coordinates=(darcy.layout.coordinates[0] ** 2, darcy.layout.coordinates[1]))
    with pytest.raises(ValueError, match="points of axis x are not symmetric"):
        refuse_unsuitable(square, TASKS["darcy"], replace(darcy, layout=uneven), 1)
    with pytest.raises(ValueError, match="a box that is periodic, but the axis x of the data is wall"):
        refuse_unsuitable(SYMMETRIES["kolmogorov-4"], FLOW_TASK, header_of(Darcy(grid=16), 0), 1)
    flow = header_of(replace(NS2D, grid=64, stored=64), 0)
    with pytest.raises(ValueError, match="a box that is not periodic, but the axis x of the data is periodic"):
        refuse_unsuitable(square, FLOW_TASK, flow, 1)
    smoke = header_of(Smoke(grid=20), 0)
    refuse_unsuitable(SYMMETRIES["upright-box"], TASKS["smoke3d"], smoke, 1)
    with pytest.raises(ValueError, match="the axes of these data are z, y, x"):
        turned = replace(smoke, layout=replace(smoke.layout, axes=("z", "y", "x")))
        refuse_unsuitable(SYMMETRIES["upright-box"], TASKS["smoke3d"], turned, 1)


def test_reflection_of_an_asymmetric_grid_would_be_wrong() -> None:
    """Why every 5th of 85 points is refused: the reflected grid has other points."""
    solver, square = Darcy(grid=21), SYMMETRIES["square"]
    coefficient = solver.coefficient(0, [0])
    pressure = solver.pressure(coefficient)
    mirror, fields = torch.tensor([[1]]), ("coefficient",)

    def error(stride: int) -> float:
        moved = square.on((21, 21)).apply(coefficient[:, None, ..., None], fields, mirror)[:, 0, ..., 0]
        truth = solver.pressure(moved)[:, ::stride, ::stride]
        coarse = pressure[:, None, ::stride, ::stride, None]
        guess = square.on(coarse.shape[2:4]).apply(coarse, ("pressure",), mirror)[:, 0, ..., 0]
        return float((guess - truth).norm() / truth.norm())

    assert error(4) < 1e-10 and error(6) > 0.05


@pytest.mark.parametrize(
    ("fields", "vectors", "unknown"),
    [
        (("u", "v"), (), "u, v"),
        (("velocity_x", "temperature"), (), "velocity_x"),
        (("momentum_x", "momentum_y"), (), "momentum_x, momentum_y"),
        (("velocity_x", "velocity_y", "Bx", "By"), (), "Bx, By"),
        (("a", "b"), (("a", "b"),), "a, b"),
        (("vorticity_z",), (), "vorticity_z"),
    ],
)
def test_vectors_with_other_names_are_refused(fields, vectors, unknown) -> None:
    with pytest.raises(ValueError, match=f"but not {unknown}; rename these fields"):
        refuse_unknown_vectors(fields, 2, vectors)
    refuse_unknown_vectors(("velocity_x", "velocity_y", "vorticity", "index", "density"), 2)


def test_shifts_move_all_components_alike() -> None:
    shifts = SYMMETRIES["shifts-2d"].on((4, 6))
    frames = torch.randn(1, 2, 4, 6, 3, generator=torch.Generator().manual_seed(0))
    moved = shifts.apply(frames, ("u", "v", "Bx"), torch.tensor([[0, 1, 2]]))
    assert torch.equal(moved, frames.roll((-1, -2), (2, 3)))


def test_own_task_with_the_name_of_a_benchmark_has_no_symmetries() -> None:
    with pytest.raises(ValueError, match="No symmetries of the task darcy are known"):
        symmetries_of(replace(TASKS["darcy"], inputs=("k",), targets=("p",)))
    assert symmetries_of(replace(TASKS["darcy"], train=10, grid=(43, 43))) is SYMMETRIES["square"]


def test_symmetries_commute_with_darcy_solver() -> None:
    solver = Darcy(grid=41)
    square = SYMMETRIES["square"].on((41, 41))
    rows = every_row(square)
    coefficient = solver.coefficient(0, [0])[:, None, ..., None].expand(8, -1, -1, -1, -1)
    transformed = square.apply(coefficient, ("coefficient",), rows)
    pressure = solver.pressure(coefficient[:1, 0, ..., 0])[:, None, ..., None].expand(8, -1, -1, -1, -1)
    expected = square.apply(pressure, ("pressure",), rows)[:, 0, ..., 0]
    torch.testing.assert_close(solver.pressure(transformed[:, 0, ..., 0]), expected, rtol=1e-8, atol=1e-10)


def test_symmetries_commute_with_turbulence() -> None:
    solver = Turbulence(grid=16, frames=2, steps_per_frame=5, precision="float64")
    cube = SYMMETRIES["periodic-cube"].on((16,) * 3)
    rows = some_rows(cube)[::5]
    velocity = ("velocity_x", "velocity_y", "velocity_z")
    initial = solver.initial(0, [0])[:, None].expand(len(rows), *(-1,) * 5)
    actual = solver.evolve(cube.apply(initial, velocity, rows)[:, 0])
    expected = cube.apply(solver.evolve(initial[:1, 0]).expand(len(rows), *(-1,) * 5), ("pressure", *velocity), rows)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().amax()))


def test_symmetries_commute_with_smoke() -> None:
    solver = Smoke(grid=20, frames=3, precision="float64")
    box = SYMMETRIES["upright-box"].on((20,) * 3)
    rows, fields = every_row(box), ("density", "velocity_x", "velocity_y", "velocity_z")
    initial = solver.initial(0, [0])[:, None, ..., None].expand(2, *(-1,) * 5)
    actual = solver.evolve(box.apply(initial, ("density",), rows)[:, 0, ..., 0])
    expected = box.apply(solver.evolve(initial[:1, 0, ..., 0]).expand(2, *(-1,) * 5), fields, rows)
    assert float(expected[..., 1:].abs().amax()) > 0.1
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_first_symmetries_are_different_and_nested() -> None:
    symmetries = SYMMETRIES["kolmogorov-8"].on((32, 32))
    rows = symmetries.first(12)
    assert len({tuple(row) for row in rows.tolist()}) == 12
    assert rows[:, 0].tolist() == [0, 1, 2, 3] * 3
    assert torch.equal(symmetries.first(5), rows[:5])
    small = SYMMETRIES["kolmogorov-4"].on((8, 8))
    assert len(torch.unique(small.first(len(small)), dim=0)) == len(small) == 128


def test_random_symmetries_are_uniform() -> None:
    symmetries = SYMMETRIES["kolmogorov-4"].on((8, 8))
    rows = symmetries.random(12_800, torch.Generator().manual_seed(0))
    counts = torch.unique(rows, dim=0, return_counts=True)[1]
    assert len(counts) == 128
    assert float((counts - 100).square().sum() / 100) < 127 + 4 * math.sqrt(2 * 127)  # χ², four standard deviations


def test_unsuitable_symmetries_are_refused() -> None:
    with pytest.raises(ValueError, match="exchanges axes of 8 and 9 points"):
        SYMMETRIES["square"].on((8, 9))
    with pytest.raises(ValueError, match="not a whole number of its 20 grid points"):
        SYMMETRIES["kolmogorov-8"].on((20, 20))
    with pytest.raises(ValueError, match="2 axes, but the grid has 3"):
        SYMMETRIES["square"].on((8, 8, 8))
    with pytest.raises(ValueError, match="This grid has 8 symmetries; choose a number from 1 to 8, not 9"):
        SYMMETRIES["square"].on((8, 8)).first(9)
    with pytest.raises(ValueError, match=r"This grid has 128 symmetries; .* not 129"):
        SYMMETRIES["kolmogorov-4"].on((8, 8)).first(129)
    with pytest.raises(ValueError, match="not zero along every axis"):
        Translation((0, 0))
    with pytest.raises(ValueError, match="parts of a translation is 0; it must be at least 1"):
        Translation((1, 0), parts=0)
    with pytest.raises(ValueError, match="but not u, v; rename"):
        SYMMETRIES["square"].on((8, 8)).apply(torch.zeros(1, 1, 8, 8, 2), ("u", "v"), torch.zeros(1, 1).long())
    with pytest.raises(ValueError, match="must be the identity"):
        SymmetryGroup((Isometry(((0, 1), (1, 0))),))
    with pytest.raises(ValueError, match="not a signed permutation"):
        SymmetryGroup((Isometry(((1, 0), (0, 1))), Isometry(((1, 0), (1, 0)))))
    with pytest.raises(ValueError, match="of a periodic box"):
        SymmetryGroup((Isometry(((1, 0), (0, 1))),), (Translation((1, 0)),))
    with pytest.raises(ValueError, match="No symmetries of the task cylinder are known"):
        symmetries_of(TASKS["cylinder"])
