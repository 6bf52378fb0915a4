"""One rank of the CPU plane's tests, without torch: writes its slot, reduces its slice, reads the result.

Usage: shared_peer.py CONTROL_FD RANK PLANE_FD SLOTS. Every command is answered.
"""

import hashlib
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from flodl.averaging.shared import SharedPlane
from flodl.messages import Layout


def regions(image: memoryview, layout: Layout) -> tuple[Any, Any, Any]:
    f32 = np.frombuffer(image, np.float32, layout.f32_count)
    f64 = np.frombuffer(image, np.float64, layout.f64_count, layout.f64_offset)
    return f32, f64, np.frombuffer(image, np.uint8, layout.raw_bytes, layout.raw_offset)


def write(image: memoryview, layout: Layout, value: int, is_source: bool) -> str:
    f32, f64, raw = regions(image, layout)
    f32[:], f64[:], raw[:] = value, value, 200 if is_source else 0
    return "written"


def sums_of(image: memoryview, layout: Layout) -> tuple[list[float], list[float], list[int], str]:
    """The distinct values of each region, and a digest of all bytes."""
    distinct = [np.unique(region).tolist() for region in regions(image, layout)]
    return *distinct, hashlib.sha256(image).hexdigest()


def main() -> None:
    control, rank = Connection(int(sys.argv[1])), int(sys.argv[2])
    plane = SharedPlane(int(sys.argv[3]), int(sys.argv[4]), rank)
    try:
        while True:
            match control.recv():
                case ("write", layout, value):
                    control.send(write(plane.contribution(layout), layout, value, rank == 0))
                case ("contribute", layout, image):
                    plane.contribution(layout)[:] = image
                    control.send("written")
                case ("image", layout):
                    control.send(bytes(plane.result(layout)))
                case ("slice", layout, index, slices, over):
                    control.send(plane.reduce_slice(layout, index, slices, over))
                case ("sums", layout):
                    control.send(sums_of(plane.result(layout), layout))
    except EOFError:
        return


if __name__ == "__main__":
    main()
