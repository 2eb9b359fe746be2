"""The simulators of the benchmark: the paper's fields, grids and frames, and the error for unknown names."""

import pytest

from sigmasolver.simulate import SIMULATORS, simulator_of

VELOCITY = ("velocity_x", "velocity_y", "velocity_z")


@pytest.mark.parametrize(
    ("task", "fields", "stored", "frames", "last_time", "boundary"),
    [
        ("darcy", ("coefficient", "pressure"), (421, 421), 1, 0.0, "wall"),
        ("ns2d", ("vorticity",), (64, 64), 20, 20.0, "periodic"),
        ("kf2d", ("vorticity",), (256, 256), 320, 12.0, "periodic"),
        ("it3d", ("pressure", *VELOCITY), (60, 60, 60), 20, 1.0, "periodic"),
        ("smoke3d", ("density", *VELOCITY), (64, 64, 64), 20, 21.0, "wall"),
    ],
)
def test_simulators_have_the_papers_fields_grids_and_frames(task, fields, stored, frames, last_time, boundary):
    layout = simulator_of(task).layout
    assert layout.fields == fields and len(layout.units) == len(fields)
    assert tuple(len(axis) for axis in layout.coordinates) == stored
    assert layout.times.shape == (frames,) and layout.times[-1] == pytest.approx(last_time)
    assert layout.boundary == (boundary,) * len(stored)


def test_simulators_are_distinct():
    assert len(set(map(repr, SIMULATORS.values()))) == len(SIMULATORS) == 6


def test_simulator_of_suggests_similar_names():
    with pytest.raises(ValueError, match=r"did you mean .*ns2d"):
        simulator_of("ns3d")
