"""Fuzzing of data files: mutated files, each read in turn by a process that may crash.

    python -m tests.data.fuzz FOLDER FIRST STOP     one line per input: "number refused|harmless|traceback ..."

The number of an input determines its kind and its mutation.
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
EDGE_BYTES = (0, 1, 0x7F, 0x80, 0xFF)


def _hdf5(path: Path, libver: str = "earliest", userblock: int = 0, gzip: bool = True) -> None:
    filters = {"compression": "gzip", "shuffle": True} if gzip else {}
    with h5py.File(path, "w", libver=libver, userblock_size=userblock) as file:
        values = U.T if path.suffix == ".mat" else U
        file.create_dataset("u", data=values, chunks=(*values.shape[:2], 2, 1), **filters)
        if path.suffix == ".mat":
            file["t"] = np.arange(5.0)[:, None]
        else:
            file["deep/v"], file["times"], file["boundary"] = U, np.arange(3.0), ["open", "wall"]


SEED_FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
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


def mutated(original: bytes, rng: random.Random) -> bytes:
    """Change, insert or delete bytes, replace integers, copy pieces, or truncate."""
    mutant = bytearray(original)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        position = rng.randrange(min(len(mutant), rng.choice((512, 4096, len(original)))) + 1)
        choice = rng.random()
        if choice < 0.3:
            mutant[position : position + 1] = bytes([rng.randrange(256)])
        elif choice < 0.45:
            mutant[position : position + 1] = bytes([rng.choice(EDGE_BYTES)])
        elif choice < 0.6:
            number = rng.choice((0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**63, 2**64 - 1))
            mutant[position : position + 8] = struct.pack("<Q", number)
        elif choice < 0.7:
            mutant[position:position] = rng.randbytes(rng.randrange(1, 9))
        elif choice < 0.8:
            del mutant[position : position + rng.randrange(1, 30)]
        elif choice < 0.92:
            start = rng.randrange(len(original))
            piece = original[start : start + rng.randrange(1, 200)]
            mutant[position : position + len(piece)] = piece
        else:
            del mutant[position:]
    return bytes(mutant)


def use_store(path: Path) -> None:
    """Use a store as the commands do: summarise it and read windows."""
    summarise(path)
    with open_store(path) as reader:
        fields = reader.header.layout.fields
        spec = WindowSpec(fields, fields, 1, 1)
        windows = Windows(reader, range(len(reader)), spec)
        windows.batch(range(len(windows)))
        windows.resident("cpu")
    read_history(path, fields, len(reader.header.grid))


def use_arrays(path: Path, kind: str) -> None:
    """Use foreign files as the commands do: import them and read a history."""
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


def attempt(folder: Path, number: int, originals: dict[str, bytes]) -> str:
    """Outcome of an input: `refused` with one sentence, `harmless` if the file was read completely, or `traceback`."""
    rng = random.Random(number)
    kind = list(SEED_FILES)[number % len(SEED_FILES)]
    path = folder / SEED_FILES[kind][0]
    path.write_bytes(mutated(originals[kind], rng))
    try:
        use(path, kind)
        return "harmless"
    except ValueError as error:
        one_sentence = "\n" not in str(error) and str(error).endswith((".", ")"))
        return "refused" if one_sentence else f"traceback {kind} {error!r}"
    except Exception:
        return f"traceback {kind} " + " | ".join(traceback.format_exc().splitlines()[-5:])
    finally:
        for left in folder.glob("*.out*"):
            left.unlink()


def main() -> None:
    folder, first, stop = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    originals = {}
    for kind, (name, make) in SEED_FILES.items():
        make(folder / name)
        originals[kind] = (folder / name).read_bytes()
        (folder / name).unlink()
    for number in range(first, stop):
        sys.stdout.write(f"{number} {attempt(folder, number, originals)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
