"""VTK image data: fields on a uniform grid in one file, as XML (.vti) or in the legacy form (.vtk STRUCTURED_POINTS).

Points run with x fastest. The arrays of a .vti are text, base64 in place, or appended behind the XML, raw or base64:

    uncompressed   size · bytes                                   encoded together
    zlib, lzma     blocks · block size · size of the last block · compressed sizes …, then the compressed blocks
                   (in base64 the numbers are encoded by themselves; a last size of 0 says that it is full)

where the numbers are of the file's header_type. Legacy files hold text, or big-endian binary.
"""

from __future__ import annotations

import base64
import binascii
import lzma
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

import numpy as np

from sigmasolver.data.formats.source import listed
from sigmasolver.data.isolated import check_file

__all__ = ["Image", "ImageArray", "open_image"]

SUFFIXES = (".vti", ".vtk")
_TYPES = {
    "Int8": "i1", "UInt8": "u1", "Int16": "i2", "UInt16": "u2", "Int32": "i4", "UInt32": "u4", "Int64": "i8",
    "UInt64": "u8", "Float32": "f4", "Float64": "f8",
}  # fmt: skip
_LEGACY = {
    "unsigned_char": "u1", "char": "i1", "unsigned_short": "u2", "short": "i2", "unsigned_int": "u4", "int": "i4",
    "unsigned_long": "u8", "long": "i8", "vtktypeint64": "i8", "vtkidtype": "i8", "float": "f4", "double": "f8",
}  # fmt: skip
# No more than one byte beyond the size that the file tells, whatever the block would unpack to.
_UNPACK: dict[str, Callable[[bytes, int], bytes]] = {
    "vtkZLibDataCompressor": lambda data, size: zlib.decompressobj().decompress(data, size + 1),
    "vtkLZMADataCompressor": lambda data, size: lzma.LZMADecompressor().decompress(data, size + 1),
}
_RATIO = 1100
"""Bytes that a byte of zlib unpacks to at the most, and a bit."""
_HEAD = 2**16
_LONGEST = 2**24


class _DamagedError(Exception):
    """Bytes that make no sense."""


@dataclass(frozen=True)
class ImageArray:
    """An array on the points or the cells of an image."""

    shape: tuple[int, ...]
    """`(z, y, x)` without components, `(z, y, x, components)` with."""
    dtype: np.dtype
    unit: str | None
    read: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Image:
    """What one file holds."""

    path: Path
    arrays: Mapping[str, ImageArray]
    """Those on the points, or, where there are none, those on the cells."""
    axes: tuple[np.ndarray, np.ndarray, np.ndarray]
    """The coordinates x, y, z of the arrays' entries."""
    others: tuple[str, ...]
    """Arrays that lie elsewhere than those."""
    values: Mapping[str, Any]
    """What the file says of itself, such as TimeValue."""


def open_image(path: Path) -> Image:
    """What an image file holds; its arrays are read when asked for."""
    check_file(path)
    try:
        with open(path, "rb") as file:
            start = file.read(26)
            if start.startswith(b"# vtk DataFile"):
                file.seek(0)
                return _legacy(path, file.read())
            return _xml(path, file)
    except PermissionError:
        raise ValueError(f"Permission denied: {path}.") from None
    except (
        _DamagedError,
        ElementTree.ParseError,
        KeyError,
        IndexError,
        UnicodeDecodeError,
        AttributeError,
        OverflowError,
    ):
        raise _damaged(path) from None
    except ValueError as error:
        raise (error if str(path) in str(error) else _damaged(path)) from None


def _damaged(path: Path) -> ValueError:
    return ValueError(f"{path} is truncated or corrupt; copy or write it again.")


def _image(
    path: Path,
    points: tuple[int, ...],
    origin: tuple[float, ...],
    spacing: tuple[float, ...],
    found: Mapping[str, Mapping[str, ImageArray]],
    values: Mapping[str, Any],
) -> Image:
    if len(points) != 3 or min(points) < 1 or math.prod(points) > _RATIO * path.stat().st_size:
        raise _DamagedError
    place = "point" if found["point"] else "cell"
    shift = 0.0 if place == "point" else 0.5
    sizes = points if place == "point" else tuple(max(1, n - 1) for n in points)
    axes = [o + (np.arange(n) + shift) * s for n, o, s in zip(sizes, origin, spacing, strict=True)]
    if not found[place]:
        raise ValueError(f"{path} has no point or cell arrays; write it with its fields.")
    others = tuple(found["cell"]) if place == "point" else ()
    return Image(path, found[place], (axes[0], axes[1], axes[2]), others, values)


# --- XML


def _xml(path: Path, file: IO[bytes]) -> Image:
    head, encoding, base = _split_appended(path, file)
    if b"<!" in head.replace(b"<!--", b""):
        raise ValueError(f"{path} has a document type declaration, which is not allowed in VTK files; write it again.")
    root = ElementTree.fromstring(head)
    if root.tag != "VTKFile" or root.get("type") != "ImageData":
        raise ValueError(
            f"{path} contains {root.get('type', 'no VTK data')}; only ImageData is supported, resample it."
        )
    grid = root.find("ImageData")
    assert grid is not None
    pieces = grid.findall("Piece")
    if len(pieces) != 1:
        raise ValueError(f"{path} has {len(pieces)} pieces; write it as one piece.")
    if [float(one) for one in grid.get("Direction", "1 0 0 0 1 0 0 0 1").split()] != [1, 0, 0, 0, 1, 0, 0, 0, 1]:
        raise ValueError(f"{path} has rotated axes (Direction); resample it to axes x, y, z.")
    extent = [int(one) for one in pieces[0].get("Extent", grid.get("WholeExtent", "")).split()]
    points = tuple(high - low + 1 for low, high in zip(extent[::2], extent[1::2], strict=True))
    spacing = tuple(float(one) for one in grid.get("Spacing", "1 1 1").split())
    start = tuple(float(one) for one in grid.get("Origin", "0 0 0").split())
    origin = tuple(o + low * s for o, low, s in zip(start, extent[::2], spacing, strict=True))
    source = _Source(path, root, encoding, base)
    found = {
        place: {_name(one): source.array(one, points, place) for one in pieces[0].iterfind(f"{tag}/DataArray")}
        for place, tag in (("point", "PointData"), ("cell", "CellData"))
    }
    values = {_name(one): source.value(one) for one in (*root.iterfind("FieldData/*"), *grid.iterfind("FieldData/*"))}
    return _image(path, points, origin, spacing, found, values)


def _split_appended(path: Path, file: IO[bytes]) -> tuple[bytes, str, int]:
    """The XML without the appended section, that section's encoding, and where its bytes begin."""
    file.seek(0)
    head, mark = b"", -1
    while mark < 0 and (more := file.read(_HEAD)):
        at = max(0, len(head) - 20)
        head += more
        mark = head.find(b"<AppendedData", at)
    if mark < 0:
        return head, "", 0
    while b"_" not in head[mark + 13 :]:
        more = file.read(_HEAD)
        if not more or len(head) > mark + _LONGEST:
            raise _DamagedError
        head += more
    said = re.match(rb"<AppendedData\s+encoding\s*=\s*[\"'](raw|base64)[\"']\s*>\s*_", head[mark:])
    if said is None:
        raise ValueError(f"{path} has an appended section in an unknown encoding; write it raw or base64.")
    return head[:mark] + b"</VTKFile>", said[1].decode(), mark + said.end()


class _Source:
    """Reads the arrays of one XML file."""

    def __init__(self, path: Path, root: ElementTree.Element, encoding: str, base: int) -> None:
        self.path, self.encoding, self.base = path, encoding, base
        self.order = "<" if root.get("byte_order", "LittleEndian") == "LittleEndian" else ">"
        self.header = np.dtype(self.order + _TYPES[root.get("header_type", "UInt32")])
        self.compressor = root.get("compressor")
        if self.compressor is not None and self.compressor not in _UNPACK:
            raise ValueError(f"{path} is compressed with {self.compressor}; write it with zlib, lzma or uncompressed.")

    def array(self, element: ElementTree.Element, points: tuple[int, ...], place: str) -> ImageArray:
        sizes = points if place == "point" else tuple(max(1, n - 1) for n in points)
        components = int(element.get("NumberOfComponents", "1"))
        shape = (*sizes[::-1], components) if components > 1 else sizes[::-1]
        kind = element.get("type", "")
        if kind not in _TYPES:
            raise ValueError(f"{_name(element)!r} in {self.path} has type {kind or 'none'}; expected real numbers.")
        dtype = np.dtype(self.order + _TYPES[kind])
        unit = next((one.text for one in element.iterfind("InformationKey") if one.get("name") == "UNITS_LABEL"), None)

        def read() -> np.ndarray:
            try:
                values = self._values(element, dtype)
                if values.size != int(np.prod(shape)):
                    raise _DamagedError
            except (_DamagedError, zlib.error, lzma.LZMAError, binascii.Error, ValueError, EOFError):
                raise _damaged(self.path) from None
            return values.reshape(shape)

        return ImageArray(shape, dtype, unit, read)

    def value(self, element: ElementTree.Element) -> Any:
        """A number, a list of them, or a text, out of the FieldData."""
        kind = element.get("type", "")
        if kind == "String" or element.tag == "Array":
            codes = self._values(element, np.dtype("u1"))
            return bytes(codes.astype(np.uint8)).rstrip(b"\0").decode("utf-8", "backslashreplace")
        values = self._values(element, np.dtype(self.order + _TYPES[kind])).tolist()
        return values[0] if len(values) == 1 else values

    def _values(self, element: ElementTree.Element, dtype: np.dtype) -> np.ndarray:
        form = element.get("format", "ascii")
        text = "".join(element.itertext()) if form != "appended" else ""
        for inner in element.iterfind("InformationKey"):
            text = text.replace(inner.text or "", "", 1)
        if form == "ascii":
            return np.array(text.split(), dtype=dtype)
        if form == "binary":
            data = re.sub(r"\s+", "", text).encode()
            return np.frombuffer(self._base64(lambda start, stop: data[start:stop]), dtype)
        if form != "appended" or not self.encoding:
            raise _DamagedError
        begin = self.base + int(element.get("offset", ""))
        with open(self.path, "rb") as file:

            def part(start: int, stop: int) -> bytes:
                file.seek(begin + start)
                return file.read(stop - start)

            return np.frombuffer(self._raw(part) if self.encoding == "raw" else self._base64(part), dtype)

    def _raw(self, part: Callable[[int, int], bytes]) -> bytes:
        word = self.header.itemsize
        if self.compressor is None:
            size = int(self._numbers(part(0, word), 1)[0])
            return _exactly(part(word, word + size), size)
        blocks = int(self._numbers(part(0, word), 1)[0])
        start = (3 + blocks) * word
        numbers = self._numbers(part(0, start), 3 + blocks)
        return self._unpacked(numbers, part(start, start + int(numbers[3:].sum())))

    def _base64(self, part: Callable[[int, int], bytes]) -> bytes:
        word = self.header.itemsize
        first = base64.b64decode(part(0, _letters(word)), validate=True)
        if self.compressor is None:
            size = int(self._numbers(first, 1)[0])
            if len(first) == word:  # the size is encoded by itself
                data = part(_letters(word), _letters(word) + _letters(size))
                return _exactly(base64.b64decode(data, validate=True), size)
            whole = base64.b64decode(part(0, _letters(word + size)), validate=True)
            return _exactly(whole[word:], size)
        blocks = int(self._numbers(first, 1)[0])
        letters = _letters((3 + blocks) * word)
        numbers = self._numbers(base64.b64decode(part(0, letters), validate=True), 3 + blocks)
        packed = part(letters, letters + _letters(int(numbers[3:].sum())))
        return self._unpacked(numbers, base64.b64decode(packed, validate=True))

    def _numbers(self, data: bytes, count: int) -> np.ndarray:
        if not 0 < count < _LONGEST:
            raise _DamagedError
        size = count * self.header.itemsize
        numbers = np.frombuffer(_exactly(data[:size], size), self.header).astype(np.int64)
        if (numbers < 0).any():
            raise _DamagedError
        return numbers

    def _unpacked(self, numbers: np.ndarray, packed: bytes) -> bytes:
        assert self.compressor is not None
        size, last, sizes = int(numbers[1]), int(numbers[2]), numbers[3:].tolist()
        blocks, place = [], 0
        for block, length in enumerate(sizes):
            wanted = last if last and block == len(sizes) - 1 else size
            data = _exactly(packed[place : place + length], length)
            blocks.append(_exactly(_UNPACK[self.compressor](data, wanted), wanted))
            place += length
        return b"".join(blocks)


def _letters(size: int) -> int:
    """How many letters base64 takes for so many bytes."""
    return 4 * (-(-size // 3))


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise _DamagedError
    return data


def _name(element: ElementTree.Element) -> str:
    return element.get("Name", "").strip() or "array"


# --- legacy


class _Legacy:
    """The words, lines and values of a legacy file, one after another."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place, self.binary = data, 0, False

    def line(self) -> str:
        """The next line that is not empty; "" at the end."""
        while self.place < len(self.data):
            end = self.data.find(b"\n", self.place)
            end = len(self.data) if end < 0 else end
            line, self.place = self.data[self.place : end], end + 1
            if line.strip():
                return line.decode("ascii").strip()
        return ""

    def values(self, dtype: np.dtype, count: int) -> np.ndarray:
        if self.binary:
            size = count * dtype.itemsize
            start, self.place = self.place, self.place + size
            return np.frombuffer(_exactly(self.data[start : start + size], size), dtype.newbyteorder(">"))
        found = list[bytes]()
        while len(found) < count:
            end = self.data.find(b"\n", self.place)
            end = len(self.data) if end < 0 else end
            if self.place >= len(self.data):
                raise _DamagedError
            found += self.data[self.place : end].split()
            self.place = end + 1
        if len(found) != count:
            raise _DamagedError
        return np.array(found, dtype=dtype)


def _legacy(path: Path, data: bytes) -> Image:
    file = _Legacy(data)
    file.line()
    end = data.index(b"\n", file.place)  # the title may be empty
    file.place = end + 1
    form = file.line().upper()
    file.binary = form == "BINARY"
    dataset = file.line().upper().split()
    if form not in ("ASCII", "BINARY") or dataset[:1] != ["DATASET"]:
        raise _DamagedError
    if dataset[1:] != ["STRUCTURED_POINTS"]:
        raise ValueError(f"{path} contains {' '.join(dataset[1:])}; only STRUCTURED_POINTS is supported, resample it.")
    facts: dict[str, list[str]] = {}
    found: dict[str, dict[str, ImageArray]] = {"point": {}, "cell": {}}
    values: dict[str, Any] = {}
    place = ""
    while words := file.line().split():
        match words[0].upper(), words[1:]:
            case ("DIMENSIONS" | "ORIGIN" | "SPACING" | "ASPECT_RATIO") as name, numbers:
                facts[name.replace("ASPECT_RATIO", "SPACING")] = numbers
            case ("POINT_DATA" | "CELL_DATA") as name, _:
                place = name.removesuffix("_DATA").lower()
            case "SCALARS", [name, kind, *components]:
                if file.line().split()[0].upper() != "LOOKUP_TABLE":
                    raise _DamagedError
                _put(file, facts, found, place, name, kind, int(components[0]) if components else 1)
            case "VECTORS" | "NORMALS", [name, kind]:
                _put(file, facts, found, place, name, kind, 3)
            case "FIELD", [_, arrays]:
                for _ in range(int(arrays)):
                    name, components_, tuples, kind = file.line().split()
                    if place:
                        _put(file, facts, found, place, name, kind, int(components_))
                    else:
                        got = file.values(np.dtype(_LEGACY[kind.lower()]), int(components_) * int(tuples)).tolist()
                        values[name] = got[0] if len(got) == 1 else got
            case "METADATA", _:
                while file.place < len(data) and data[file.place : file.place + 1] != b"\n":
                    file.place = data.index(b"\n", file.place) + 1
            case name, _:
                raise ValueError(
                    f"{path} has a section {listed([name])}; only SCALARS, VECTORS and FIELD are supported."
                )
    points = tuple(int(one) for one in facts["DIMENSIONS"])
    origin, spacing = (
        tuple(float(one) for one in facts.get(name, default))
        for name, default in (("ORIGIN", "000"), ("SPACING", "111"))
    )
    return _image(path, points, origin, spacing, found, values)


def _put(
    file: _Legacy,
    facts: Mapping[str, list[str]],
    found: Mapping[str, dict[str, ImageArray]],
    place: str,
    name: str,
    kind: str,
    components: int,
) -> None:
    points = [int(one) for one in facts["DIMENSIONS"]]
    sizes = points if place == "point" else [max(1, n - 1) for n in points]
    shape = (*sizes[::-1], components) if components > 1 else tuple(sizes[::-1])
    values = file.values(np.dtype(_LEGACY[kind.lower()]), int(np.prod(shape))).reshape(shape)
    found[place][name] = ImageArray(shape, values.dtype, None, lambda: values)
