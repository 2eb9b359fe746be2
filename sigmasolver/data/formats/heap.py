"""Texts of free length in HDF5, read without the library, which one wrong byte among them can make loop for ever.

A dataset of such texts is a row of descriptors, each naming a text in a collection elsewhere in the file:

    descriptor   length u32 · address of the collection u64 · number of the object u32
    collection   "GCOL" · version u8 · 3 bytes · size u64 · objects
    object       number u16 · 6 bytes · length u64 · bytes, filled up to a multiple of 8
"""

from __future__ import annotations

import struct
from pathlib import Path

__all__ = ["heap_texts"]

_LARGEST = 2**24


def heap_texts(path: Path, offset: int, count: int, base: int) -> list[str]:
    """`count` texts whose descriptors lie at `offset`; addresses in the file count from `base`.

    Raises some exception or other where the bytes make no sense.
    """
    with open(path, "rb") as file:

        def at(place: int, size: int) -> bytes:
            file.seek(place)
            data = file.read(size)
            if len(data) != size:
                raise EOFError
            return data

        def collection(address: int) -> dict[int, bytes]:
            magic, size = struct.unpack("<4s4xQ", at(base + address, 16))
            if magic != b"GCOL" or size > _LARGEST:
                raise EOFError
            data, place, objects = at(base + address, size), 16, dict[int, bytes]()
            while place + 16 <= size:
                number, length = struct.unpack_from("<H6xQ", data, place)
                if number == 0:  # what follows is free
                    break
                objects[number] = data[place + 16 : place + 16 + length]
                place += 16 + (length + 7) // 8 * 8
            return objects

        texts = list[str]()
        known = dict[int, dict[int, bytes]]()
        for length, address, number in struct.iter_unpack("<IQI", at(offset, 16 * count)):
            if length and address not in known:
                known[address] = collection(address)
            # Some programs count the closing zero byte among the text.
            texts.append(known[address][number][:length].rstrip(b"\0").decode() if length else "")
    return texts
