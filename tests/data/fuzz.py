"""Mutated files, each tried in turn by a process that may die of it.

    python -m tests.data.fuzz FOLDER FIRST STOP     one line for each number: "number refused|harmless|traceback ..."

The number of an input fixes its kind and what is done to it.
"""

from __future__ import annotations

import random
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import scipy.io

from sigmasolver.data.formats import import_data, read_history
from sigmasolver.data.inspect import summarise
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows, WindowSpec
from tests.data.test_store import store
from tests.data.test_store import values as stored_values

U = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
ODD = (0, 1, 0x7F, 0x80, 0xFF)


def _hdf5(path: Path, libver: str = "earliest", userblock: int = 0, gzip: bool = True) -> None:
    packed = {"compression": "gzip", "shuffle": True} if gzip else {}
    with h5py.File(path, "w", libver=libver, userblock_size=userblock) as file:
        turned = U.T if path.suffix == ".mat" else U
        file.create_dataset("u", data=turned, chunks=(*turned.shape[:2], 2, 1), **packed)
        if path.suffix == ".mat":
            file["t"] = np.arange(5.0)[:, None]
        else:
            file["deep/v"], file["times"], file["boundary"] = U, np.arange(3.0), ["open", "wall"]


KINDS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "store": ("a.h5", lambda path: store(path, stored_values(3))),
    "h5": ("a.h5", _hdf5),
    "h5-latest": ("a.h5", lambda path: _hdf5(path, "latest")),
    "h5-plain": ("a.h5", lambda path: _hdf5(path, gzip=False)),
    "mat-7.3": ("a.mat", lambda path: _hdf5(path, userblock=512)),
    "mat-5": ("a.mat", lambda path: scipy.io.savemat(path, {"u": U, "t": np.arange(5.0)[None]})),
    "mat-5-packed": ("a.mat", lambda path: scipy.io.savemat(path, {"u": U}, do_compression=True)),
    "npy": ("a.npy", lambda path: np.save(path, U)),
    "npz": ("a.npz", lambda path: np.savez_compressed(path, u=U, v=U, times=np.arange(3.0))),
    "npz-fields": ("a.npz", lambda path: np.savez(path, fields=U, names=np.array(list("abcde")))),
}


def mutated(whole: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, inserted or taken out, numbers in the structure replaced, pieces copied, the end cut off."""
    content = bytearray(whole)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        place = chance.randrange(min(len(content), chance.choice((512, 4096, len(whole)))) + 1)
        how = chance.random()
        if how < 0.3:
            content[place : place + 1] = bytes([chance.randrange(256)])
        elif how < 0.45:
            content[place : place + 1] = bytes([chance.choice(ODD)])
        elif how < 0.6:
            number = chance.choice((0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**63, 2**64 - 1))
            content[place : place + 8] = struct.pack("<Q", number)
        elif how < 0.7:
            content[place:place] = chance.randbytes(chance.randrange(1, 9))
        elif how < 0.8:
            del content[place : place + chance.randrange(1, 30)]
        elif how < 0.92:
            start = chance.randrange(len(whole))
            piece = whole[start : start + chance.randrange(1, 200)]
            content[place : place + len(piece)] = piece
        else:
            del content[place:]
    return bytes(content)


def use_store(path: Path) -> None:
    """What the commands do with a store: look into it, and cut windows from it."""
    summarise(path)
    with open_store(path) as reader:
        fields = reader.header.layout.fields
        spec = WindowSpec(fields, fields, 1, 1)
        windows = Windows(reader, range(len(reader)), spec)
        windows.batch(range(len(windows)))
        windows.resident("cpu")
    read_history(path, fields, len(reader.header.grid))


def use_arrays(path: Path, kind: str) -> None:
    """What the commands do with foreign files: import them, and forecast from them."""
    if path.suffix == ".mat":
        import_data(path, path.with_suffix(".out"))
        return
    import_data(path, path.with_suffix(".out"), kind="arrays", steady=False)
    if kind == "npz-fields":
        read_history(path, list("abcde"), 1)
    else:
        read_history(path, ["u"], 2)


def use(path: Path, kind: str) -> None:
    use_store(path) if kind == "store" else use_arrays(path, kind)


def attempt(folder: Path, number: int, whole: dict[str, bytes]) -> str:
    """What came of it: `refused` takes one sentence, `harmless` that the file is used to the end."""
    chance = random.Random(number)
    kind = list(KINDS)[number % len(KINDS)]
    path = folder / KINDS[kind][0]
    path.write_bytes(mutated(whole[kind], chance))
    try:
        use(path, kind)
        return "harmless"
    except ValueError as error:
        plain = "\n" not in str(error) and str(error).endswith((".", ")"))
        return "refused" if plain else f"traceback {kind} {error!r}"
    except Exception:
        return f"traceback {kind} " + " | ".join(traceback.format_exc().splitlines()[-5:])
    finally:
        for left in folder.glob("*.out*"):
            left.unlink()


def main() -> None:
    folder, first, stop = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    whole = {}
    for kind, (name, make) in KINDS.items():
        make(folder / name)
        whole[kind] = (folder / name).read_bytes()
        (folder / name).unlink()
    for number in range(first, stop):
        sys.stdout.write(f"{number} {attempt(folder, number, whole)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
