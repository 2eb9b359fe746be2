"""Writers of the VTK files that no fixture contains: the legacy .vtk, and a collection of files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import quoteattr

import numpy as np

from sigmasolver.simulate.fixtures.vtk import Fields, join_numbers, x_fastest

_LEGACY_TYPES = {"f4": "float", "f8": "double", "i4": "int", "u1": "unsigned_char"}


def write_vtk(
    path: Path,
    fields: Fields,
    origin: tuple[float, float, float],
    spacing: tuple[float, float, float],
    time: float | None = None,
    binary: bool = True,
) -> None:
    """Write a legacy .vtk."""
    shape = next(iter(fields.values())).shape[:3]
    lines = [b"# vtk DataFile Version 3.0", b"fields on a uniform grid", b"BINARY" if binary else b"ASCII"]
    lines.append(b"DATASET STRUCTURED_POINTS")
    if time is not None:
        lines += [b"FIELD FieldData 1", b"TimeValue 1 1 double", _encode_legacy(np.array([time]), binary)]
    lines.append(f"DIMENSIONS {' '.join(map(str, shape))}".encode())
    lines += [f"ORIGIN {join_numbers(origin)}".encode(), f"SPACING {join_numbers(spacing)}".encode()]
    lines.append(f"POINT_DATA {int(np.prod(shape))}".encode())
    for name, values in fields.items():
        kind = _LEGACY_TYPES[values.dtype.str[1:]]
        if values.shape[3:] == (3,):
            lines.append(f"VECTORS {name} {kind}".encode())
        else:
            lines += [f"SCALARS {name} {kind} {(*values.shape, 1)[3]}".encode(), b"LOOKUP_TABLE default"]
        lines.append(_encode_legacy(x_fastest(values), binary))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(lines) + b"\n")


def _encode_legacy(values: np.ndarray, binary: bool) -> bytes:
    if binary:
        return values.astype(values.dtype.newbyteorder(">")).tobytes()
    return "\n".join(map(repr, values.ravel().tolist())).encode()


def write_pvd(path: Path, files: Mapping[str, float]) -> None:
    """Write a collection: files and their times."""
    entries = "\n".join(
        f'<DataSet timestep="{time!r}" part="0" file={quoteattr(name)}/>' for name, time in files.items()
    )
    path.write_text(
        f'<?xml version="1.0"?>\n<VTKFile type="Collection" version="0.1">\n<Collection>\n{entries}\n</Collection>\n'
        "</VTKFile>\n"
    )
