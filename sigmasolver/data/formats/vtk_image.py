"""VTK image data: fields on a uniform grid in one file, as XML (.vti) or in the legacy form (.vtk STRUCTURED_POINTS).

Points run with x fastest. The arrays of a .vti are text, inline base64, or appended after the XML, raw or base64:

    uncompressed   size · bytes                                   encoded together
    zlib, lzma     blocks · block size · size of the last block · compressed sizes …, then the compressed blocks
                   (in base64 the numbers are encoded separately; a last size of 0 means a full block)

where the numbers have the file's header_type. Legacy files contain text or big-endian binary.
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
_LEGACY_TYPES = {
    "unsigned_char": "u1", "char": "i1", "unsigned_short": "u2", "short": "i2", "unsigned_int": "u4", "int": "i4",
    "unsigned_long": "u8", "long": "i8", "vtktypeint64": "i8", "vtkidtype": "i8", "float": "f4", "double": "f8",
}  # fmt: skip
# Limited to one byte beyond the declared size, so that a malicious block cannot exhaust memory.
_DECOMPRESS: dict[str, Callable[[bytes, int], bytes]] = {
    "vtkZLibDataCompressor": lambda data, size: zlib.decompressobj().decompress(data, size + 1),
    "vtkLZMADataCompressor": lambda data, size: lzma.LZMADecompressor().decompress(data, size + 1),
}
_MAX_RATIO = 1100
"""An upper bound on the compression ratio of zlib."""
_BLOCK_BYTES = 2**16
_MAX_HEADER = 2**24


class _CorruptError(Exception):
    """The file is malformed."""


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
    """The content of one file."""

    path: Path
    arrays: Mapping[str, ImageArray]
    """Arrays on the points, or those on the cells if there are none."""
    axes: tuple[np.ndarray, np.ndarray, np.ndarray]
    """The coordinates x, y, z of the arrays' entries."""
    skipped: tuple[str, ...]
    """Arrays on the cells if those on the points are used."""
    field_data: Mapping[str, Any]
    """Metadata of the file, such as TimeValue."""


def open_image(path: Path) -> Image:
    """Open an image file; its arrays are read on demand."""
    check_file(path)
    try:
        with open(path, "rb") as file:
            magic = file.read(26)
            if magic.startswith(b"# vtk DataFile"):
                file.seek(0)
                return _read_legacy(path, file.read())
            return _read_xml(path, file)
    except PermissionError:
        raise ValueError(f"Permission denied: {path}.") from None
    except (
        _CorruptError,
        ElementTree.ParseError,
        KeyError,
        IndexError,
        UnicodeDecodeError,
        AttributeError,
        OverflowError,
    ):
        raise _corrupt_error(path) from None
    except ValueError as error:
        raise (error if str(path) in str(error) else _corrupt_error(path)) from None


def _corrupt_error(path: Path) -> ValueError:
    return ValueError(f"{path} is truncated or corrupt; copy or write it again.")


def _make_image(
    path: Path,
    points: tuple[int, ...],
    origin: tuple[float, ...],
    spacing: tuple[float, ...],
    arrays: Mapping[str, Mapping[str, ImageArray]],
    field_data: Mapping[str, Any],
) -> Image:
    if len(points) != 3 or min(points) < 1 or math.prod(points) > _MAX_RATIO * path.stat().st_size:
        raise _CorruptError
    location = "point" if arrays["point"] else "cell"
    shift = 0.0 if location == "point" else 0.5
    sizes = points if location == "point" else tuple(max(1, n - 1) for n in points)
    axes = [o + (np.arange(n) + shift) * s for n, o, s in zip(sizes, origin, spacing, strict=True)]
    if not arrays[location]:
        raise ValueError(f"{path} has no point or cell arrays; write it with its fields.")
    skipped = tuple(arrays["cell"]) if location == "point" else ()
    return Image(path, arrays[location], (axes[0], axes[1], axes[2]), skipped, field_data)


# --- XML


def _read_xml(path: Path, file: IO[bytes]) -> Image:
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
    if [float(number) for number in grid.get("Direction", "1 0 0 0 1 0 0 0 1").split()] != [1, 0, 0, 0, 1, 0, 0, 0, 1]:
        raise ValueError(f"{path} has rotated axes (Direction); resample it to axes x, y, z.")
    extent = [int(number) for number in pieces[0].get("Extent", grid.get("WholeExtent", "")).split()]
    points = tuple(high - low + 1 for low, high in zip(extent[::2], extent[1::2], strict=True))
    spacing = tuple(float(number) for number in grid.get("Spacing", "1 1 1").split())
    start = tuple(float(number) for number in grid.get("Origin", "0 0 0").split())
    origin = tuple(o + low * s for o, low, s in zip(start, extent[::2], spacing, strict=True))
    reader = _XmlReader(path, root, encoding, base)
    arrays = {
        location: {
            _name(element): reader.array(element, points, location)
            for element in pieces[0].iterfind(f"{tag}/DataArray")
        }
        for location, tag in (("point", "PointData"), ("cell", "CellData"))
    }
    field_data = {
        _name(element): reader.value(element)
        for element in (*root.iterfind("FieldData/*"), *grid.iterfind("FieldData/*"))
    }
    return _make_image(path, points, origin, spacing, arrays, field_data)


def _split_appended(path: Path, file: IO[bytes]) -> tuple[bytes, str, int]:
    """The XML without the appended section, the encoding of that section, and the offset of its first byte."""
    file.seek(0)
    head, tag_start = b"", -1
    while tag_start < 0 and (block := file.read(_BLOCK_BYTES)):
        search_from = max(0, len(head) - 20)
        head += block
        tag_start = head.find(b"<AppendedData", search_from)
    if tag_start < 0:
        return head, "", 0
    while b"_" not in head[tag_start + 13 :]:
        block = file.read(_BLOCK_BYTES)
        if not block or len(head) > tag_start + _MAX_HEADER:
            raise _CorruptError
        head += block
    match = re.match(rb"<AppendedData\s+encoding\s*=\s*[\"'](raw|base64)[\"']\s*>\s*_", head[tag_start:])
    if match is None:
        raise ValueError(f"{path} has an appended section in an unknown encoding; write it raw or base64.")
    return head[:tag_start] + b"</VTKFile>", match[1].decode(), tag_start + match.end()


class _XmlReader:
    """Reads the arrays of one XML file."""

    def __init__(self, path: Path, root: ElementTree.Element, encoding: str, base: int) -> None:
        self.path, self.encoding, self.base = path, encoding, base
        self.order = "<" if root.get("byte_order", "LittleEndian") == "LittleEndian" else ">"
        self.header = np.dtype(self.order + _TYPES[root.get("header_type", "UInt32")])
        self.compressor = root.get("compressor")
        if self.compressor is not None and self.compressor not in _DECOMPRESS:
            raise ValueError(f"{path} is compressed with {self.compressor}; write it with zlib, lzma or uncompressed.")

    def array(self, element: ElementTree.Element, points: tuple[int, ...], location: str) -> ImageArray:
        sizes = points if location == "point" else tuple(max(1, n - 1) for n in points)
        components = int(element.get("NumberOfComponents", "1"))
        shape = (*sizes[::-1], components) if components > 1 else sizes[::-1]
        kind = element.get("type", "")
        if kind not in _TYPES:
            raise ValueError(f"{_name(element)!r} in {self.path} has type {kind or 'none'}; expected real numbers.")
        dtype = np.dtype(self.order + _TYPES[kind])
        unit = next((key.text for key in element.iterfind("InformationKey") if key.get("name") == "UNITS_LABEL"), None)

        def read() -> np.ndarray:
            try:
                values = self._read_values(element, dtype)
                if values.size != int(np.prod(shape)):
                    raise _CorruptError
            except (_CorruptError, zlib.error, lzma.LZMAError, binascii.Error, ValueError, EOFError):
                raise _corrupt_error(self.path) from None
            return values.reshape(shape)

        return ImageArray(shape, dtype, unit, read)

    def value(self, element: ElementTree.Element) -> Any:
        """A number, a list of numbers or a string of the FieldData."""
        kind = element.get("type", "")
        if kind == "String" or element.tag == "Array":
            codes = self._read_values(element, np.dtype("u1"))
            return bytes(codes.astype(np.uint8)).rstrip(b"\0").decode("utf-8", "backslashreplace")
        values = self._read_values(element, np.dtype(self.order + _TYPES[kind])).tolist()
        return values[0] if len(values) == 1 else values

    def _read_values(self, element: ElementTree.Element, dtype: np.dtype) -> np.ndarray:
        form = element.get("format", "ascii")
        text = "".join(element.itertext()) if form != "appended" else ""
        for inner in element.iterfind("InformationKey"):
            text = text.replace(inner.text or "", "", 1)
        if form == "ascii":
            return np.array(text.split(), dtype=dtype)
        if form == "binary":
            data = re.sub(r"\s+", "", text).encode()
            return np.frombuffer(self._read_base64(lambda start, stop: data[start:stop]), dtype)
        if form != "appended" or not self.encoding:
            raise _CorruptError
        begin = self.base + int(element.get("offset", ""))
        with open(self.path, "rb") as file:

            def read(start: int, stop: int) -> bytes:
                file.seek(begin + start)
                return file.read(stop - start)

            return np.frombuffer(self._read_raw(read) if self.encoding == "raw" else self._read_base64(read), dtype)

    def _read_raw(self, read: Callable[[int, int], bytes]) -> bytes:
        itemsize = self.header.itemsize
        if self.compressor is None:
            size = int(self._decode_header(read(0, itemsize), 1)[0])
            return _check_size(read(itemsize, itemsize + size), size)
        blocks = int(self._decode_header(read(0, itemsize), 1)[0])
        start = (3 + blocks) * itemsize
        numbers = self._decode_header(read(0, start), 3 + blocks)
        return self._decompress(numbers, read(start, start + int(numbers[3:].sum())))

    def _read_base64(self, read: Callable[[int, int], bytes]) -> bytes:
        itemsize = self.header.itemsize
        first = base64.b64decode(read(0, _base64_length(itemsize)), validate=True)
        if self.compressor is None:
            size = int(self._decode_header(first, 1)[0])
            if len(first) == itemsize:  # the size is encoded separately
                data = read(_base64_length(itemsize), _base64_length(itemsize) + _base64_length(size))
                return _check_size(base64.b64decode(data, validate=True), size)
            decoded = base64.b64decode(read(0, _base64_length(itemsize + size)), validate=True)
            return _check_size(decoded[itemsize:], size)
        blocks = int(self._decode_header(first, 1)[0])
        header_length = _base64_length((3 + blocks) * itemsize)
        numbers = self._decode_header(base64.b64decode(read(0, header_length), validate=True), 3 + blocks)
        compressed = read(header_length, header_length + _base64_length(int(numbers[3:].sum())))
        return self._decompress(numbers, base64.b64decode(compressed, validate=True))

    def _decode_header(self, data: bytes, count: int) -> np.ndarray:
        if not 0 < count < _MAX_HEADER:
            raise _CorruptError
        size = count * self.header.itemsize
        numbers = np.frombuffer(_check_size(data[:size], size), self.header).astype(np.int64)
        if (numbers < 0).any():
            raise _CorruptError
        return numbers

    def _decompress(self, numbers: np.ndarray, compressed: bytes) -> bytes:
        assert self.compressor is not None
        size, last, sizes = int(numbers[1]), int(numbers[2]), numbers[3:].tolist()
        blocks, offset = [], 0
        for block, length in enumerate(sizes):
            expected = last if last and block == len(sizes) - 1 else size
            data = _check_size(compressed[offset : offset + length], length)
            blocks.append(_check_size(_DECOMPRESS[self.compressor](data, expected), expected))
            offset += length
        return b"".join(blocks)


def _base64_length(size: int) -> int:
    """The number of base64 characters for this many bytes."""
    return 4 * (-(-size // 3))


def _check_size(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise _CorruptError
    return data


def _name(element: ElementTree.Element) -> str:
    return element.get("Name", "").strip() or "array"


# --- legacy


class _LegacyReader:
    """Reads the lines and values of a legacy file in sequence."""

    def __init__(self, data: bytes) -> None:
        self.data, self.position, self.binary = data, 0, False

    def line(self) -> str:
        """The next non-empty line; "" at the end of the file."""
        while self.position < len(self.data):
            end = self.data.find(b"\n", self.position)
            end = len(self.data) if end < 0 else end
            line, self.position = self.data[self.position : end], end + 1
            if line.strip():
                return line.decode("ascii").strip()
        return ""

    def values(self, dtype: np.dtype, count: int) -> np.ndarray:
        if self.binary:
            size = count * dtype.itemsize
            start, self.position = self.position, self.position + size
            return np.frombuffer(_check_size(self.data[start : start + size], size), dtype.newbyteorder(">"))
        numbers = list[bytes]()
        while len(numbers) < count:
            end = self.data.find(b"\n", self.position)
            end = len(self.data) if end < 0 else end
            if self.position >= len(self.data):
                raise _CorruptError
            numbers += self.data[self.position : end].split()
            self.position = end + 1
        if len(numbers) != count:
            raise _CorruptError
        return np.array(numbers, dtype=dtype)


def _read_legacy(path: Path, data: bytes) -> Image:
    file = _LegacyReader(data)
    file.line()
    end = data.index(b"\n", file.position)  # the title may be empty
    file.position = end + 1
    form = file.line().upper()
    file.binary = form == "BINARY"
    dataset = file.line().upper().split()
    if form not in ("ASCII", "BINARY") or dataset[:1] != ["DATASET"]:
        raise _CorruptError
    if dataset[1:] != ["STRUCTURED_POINTS"]:
        raise ValueError(f"{path} contains {' '.join(dataset[1:])}; only STRUCTURED_POINTS is supported, resample it.")
    geometry: dict[str, list[str]] = {}
    arrays: dict[str, dict[str, ImageArray]] = {"point": {}, "cell": {}}
    field_data: dict[str, Any] = {}
    location = ""
    while tokens := file.line().split():
        match tokens[0].upper(), tokens[1:]:
            case ("DIMENSIONS" | "ORIGIN" | "SPACING" | "ASPECT_RATIO") as name, numbers:
                geometry[name.replace("ASPECT_RATIO", "SPACING")] = numbers
            case ("POINT_DATA" | "CELL_DATA") as name, _:
                location = name.removesuffix("_DATA").lower()
            case "SCALARS", [name, kind, *components]:
                if file.line().split()[0].upper() != "LOOKUP_TABLE":
                    raise _CorruptError
                _add_array(file, geometry, arrays, location, name, kind, int(components[0]) if components else 1)
            case "VECTORS" | "NORMALS", [name, kind]:
                _add_array(file, geometry, arrays, location, name, kind, 3)
            case "FIELD", [_, count]:
                for _ in range(int(count)):
                    name, components_, tuples, kind = file.line().split()
                    if location:
                        _add_array(file, geometry, arrays, location, name, kind, int(components_))
                    else:
                        content = file.values(
                            np.dtype(_LEGACY_TYPES[kind.lower()]), int(components_) * int(tuples)
                        ).tolist()
                        field_data[name] = content[0] if len(content) == 1 else content
            case "METADATA", _:
                while file.position < len(data) and data[file.position : file.position + 1] != b"\n":
                    file.position = data.index(b"\n", file.position) + 1
            case name, _:
                raise ValueError(
                    f"{path} has a section {listed([name])}; only SCALARS, VECTORS and FIELD are supported."
                )
    points = tuple(int(number) for number in geometry["DIMENSIONS"])
    origin, spacing = (
        tuple(float(number) for number in geometry.get(name, default))
        for name, default in (("ORIGIN", "000"), ("SPACING", "111"))
    )
    return _make_image(path, points, origin, spacing, arrays, field_data)


def _add_array(
    file: _LegacyReader,
    geometry: Mapping[str, list[str]],
    arrays: Mapping[str, dict[str, ImageArray]],
    location: str,
    name: str,
    kind: str,
    components: int,
) -> None:
    points = [int(number) for number in geometry["DIMENSIONS"]]
    sizes = points if location == "point" else [max(1, n - 1) for n in points]
    shape = (*sizes[::-1], components) if components > 1 else tuple(sizes[::-1])
    values = file.values(np.dtype(_LEGACY_TYPES[kind.lower()]), int(np.prod(shape))).reshape(shape)
    arrays[location][name] = ImageArray(shape, values.dtype, None, lambda: values)
