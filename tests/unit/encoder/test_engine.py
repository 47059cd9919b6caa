"""The engine's loop: one end per job, bad images fail alone, cancelled ones are not run."""

import gc
from collections.abc import Iterator
from itertools import chain

import msgspec
import pytest
import torch

from services.common.embeddings.shared_memory import MemoryAddress
from services.common.geometry import Unit
from services.encoder.decoding.source import Source, Video
from services.encoder.engine.batcher import Batcher
from services.encoder.engine.job import Job
from services.encoder.engine.messages import (
    CancelImage,
    EncodeImage,
    FrontMessage,
    MoveImage,
    PlaceImage,
    Shutdown,
)
from services.encoder.engine_main import MAX_BATCH_PATCHES, batch_budget
from tests.encoder_harness import (
    BAD_FRAMES,
    GRID,
    LARGE,
    Running,
    wait_until,
)
from tests.noise import PATIENCE_S


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


def test_each_job_ends_once(running: Running) -> None:
    ids = list(range(1, 40))
    running.front.encode(*ids)
    assert running.front.codes(*ids) == [""] * 39
    running.front.receive_until(lambda: running.front.stats.num_images == 39)
    assert sorted(chain.from_iterable(running.runner.batches)) == ids
    assert running.front.stats.num_patches == 39 * 16


def test_waiting_images_share_batches(running: Running) -> None:
    running.runner.may_run.clear()
    running.front.encode(*range(1, 10))
    wait_until(lambda: len(running.preprocessor.prepared) == 9)
    running.runner.may_run.set()
    running.front.codes(*range(1, 10))
    # 64 patches of budget, 16 an image; whatever the first batch took, the rest is full.
    assert len(running.runner.batches) <= 4
    assert max(len(batch) for batch in running.runner.batches) == 4


def test_the_front_knows_what_is_worked_on(running: Running) -> None:
    """Should the engine end, all others had no part in it."""
    front = running.front
    running.preprocessor.may_prepare.clear()
    front.encode(1)
    front.receive_until(lambda: front.active == [[1]])  # being prepared
    running.runner.may_run.clear()
    running.preprocessor.may_prepare.set()
    front.receive_until(lambda: front.active == [[1], [], [1]])  # prepared, and launched
    front.encode(2)
    front.receive_until(lambda: front.active[3:] == [[1, 2], [1]])  # waits for the next batch
    running.runner.may_run.set()
    assert front.codes(1, 2) == ["", ""]
    assert front.active[-1] == [2]


def test_two_batches_are_in_flight_and_the_rest_waits(running: Running) -> None:
    running.runner.device_done.clear()
    for job_id in range(1, 5):
        running.front.encode(job_id, grid=(1, 8, 8))  # a whole batch each
    wait_until(lambda: len(running.preprocessor.prepared) == 4 and len(running.runner.batches) == 2)
    assert not running.front.done
    running.runner.device_done.set()
    assert running.front.codes(1, 2, 3, 4) == [""] * 4
    assert sorted(running.runner.batches) == [[1], [2], [3], [4]]


def test_the_device_is_busy_while_batches_are_on_it(running: Running) -> None:
    running.front.encode(1)
    assert running.front.codes(1) == [""]
    running.runner.device_done.clear()
    running.clock.now += 5  # idle
    running.front.encode(2, grid=(1, 8, 8))
    running.front.encode(3, grid=(1, 8, 8))
    wait_until(lambda: len(running.runner.batches) == 3)
    running.clock.now += 2
    running.runner.device_done.set()
    running.front.receive_until(lambda: running.front.stats.num_images == 3)
    assert running.front.stats.busy_s == 2


def test_a_bad_image_fails_alone(running: Running) -> None:
    running.front.encode(1, 666, 2, 667, 3)
    assert running.front.codes(1, 2, 3) == ["", "", ""]
    assert running.front.codes(666, 667) == ["invalid_image", "internal_error"]
    assert "bug" not in running.front.done[667].message


def test_nothing_holds_bad_images_until_the_collector_runs(running: Running) -> None:
    """But a thread of the pool its last one."""
    gc.collect()
    gc.disable()
    try:
        for job_id in range(8):
            running.front.send(EncodeImage(job_id, Source(b"666"), Unit(GRID)))
        assert running.front.codes(*range(8)) == ["invalid_image"] * 8
        wait_until(lambda: sum(isinstance(each, Job) for each in gc.get_objects()) <= 2)
    finally:
        gc.enable()


def test_the_next_frames_are_decoded_while_the_last_are_resized(running: Running) -> None:
    """And after some that cannot be, whose turn ends with them."""
    running.preprocessor.may_prepare.clear()
    video = Source(video=Video(MemoryAddress(0, 0, "clip", 0), (64, 64)))
    frames = [(0, 1), BAD_FRAMES, (4, 5)]
    for job_id, pair in enumerate(frames):
        running.front.send(EncodeImage(job_id, video, Unit(GRID, pair)), PlaceImage(job_id, 0))
    wait_until(lambda: running.preprocessor.decoded == frames)
    assert not running.preprocessor.prepared
    running.preprocessor.may_prepare.set()
    assert running.front.codes(0, 1, 2) == ["", "invalid_video", ""]


def test_a_tenants_videos_leave_a_thread_to_others(running: Running) -> None:
    """The thread also serves images of the tenant, and videos of other tenants."""

    def unit_of(name: str, job_id: int, tenant: str) -> EncodeImage:
        video = Source(video=Video(MemoryAddress(0, 0, name, 0), (64, 64)))
        return EncodeImage(job_id, video, Unit(GRID, (job_id, job_id)), 0.0, tenant)

    running.preprocessor.may_decode.clear()
    crowd = [unit_of(f"clip {job_id}", job_id, "crowd") for job_id in range(4)]
    running.front.send(*crowd, *(PlaceImage(job_id, 0) for job_id in range(4)))
    wait_until(lambda: running.preprocessor.decoded == [(0, 0)])
    running.front.encode(10, rank=9.0)
    assert running.front.codes(10) == [""]
    running.front.send(unit_of("guest", 11, "guest"), PlaceImage(11, 0))
    wait_until(lambda: running.preprocessor.decoded == [(0, 0), (11, 11)])
    running.preprocessor.may_decode.set()
    assert running.front.codes(0, 1, 2, 3, 11) == [""] * 5


def test_free_threads_decode_a_video_from_its_key_frames() -> None:
    running = Running(workers=6)
    try:
        wait_until(lambda: running.engine.num_free == 6)
        running.preprocessor.may_decode.clear()
        for job_id in range(8):
            memory = MemoryAddress(0, 0, "clip", 0)
            video = Source(video=Video(memory, (64, 64), start=job_id // 2 * 10))
            frames = 5 * job_id, 5 * job_id + 1
            running.front.send(EncodeImage(job_id, video, Unit(GRID, frames)))
            running.front.send(PlaceImage(job_id, 0))
        # Three lanes, of the five threads for videos.
        wait_until(lambda: sorted(running.preprocessor.decoded) == [(0, 1), (10, 11), (20, 21)])
        running.front.encode(10)
        assert running.front.codes(10) == [""]
        running.preprocessor.may_decode.set()
        assert running.front.codes(*range(8)) == [""] * 8
        lanes = running.preprocessor.lanes
        assert len(running.preprocessor.decoded) == len(lanes) == 8
        for first in (0, 10, 20, 30):  # one decoder for each segment
            assert lanes[first, first + 1] == lanes[first + 5, first + 6]
        assert running.preprocessor.finished == ["clip"]  # then other videos may have its decoders
    finally:
        running.stop()


def test_an_image_the_device_cannot_take_fails_alone(running: Running) -> None:
    running.runner.poisoned.add(3)
    running.runner.may_run.clear()
    running.front.encode(*range(1, 9))
    wait_until(lambda: len(running.preprocessor.prepared) == 8)
    running.runner.may_run.set()
    assert running.front.codes(*range(1, 9)) == ["", "", "internal_error", "", "", "", "", ""]
    assert running.runner.recovered > 0


def test_out_of_memory_costs_only_the_largest(running: Running) -> None:
    running.runner.room = 40
    running.runner.may_run.clear()
    running.front.encode(1, 2)
    running.front.encode(3, grid=(1, 8, 8))
    running.front.encode(4)
    wait_until(lambda: len(running.preprocessor.prepared) == 4)
    running.runner.may_run.set()
    assert running.front.codes(1, 2, 3, 4) == ["", "", "overloaded", ""]


def test_an_image_that_is_not_finite_fails(running: Running) -> None:
    running.runner.not_finite.add(2)
    running.front.encode(1, 2, 3)
    assert running.front.codes(1, 2, 3) == ["", "internal_error", ""]


def test_a_cancelled_image_is_not_run(running: Running) -> None:
    running.preprocessor.may_prepare.clear()
    running.front.encode(1, 2, 3, 4)
    running.front.send(CancelImage(4), CancelImage(3), CancelImage(99))
    wait_until(lambda: 4 in running.engine.jobs and running.engine.jobs[4].cancelled)
    running.preprocessor.may_prepare.set()
    assert running.front.codes(1, 2, 4) == ["", "", "cancelled"]
    assert b"4" not in running.preprocessor.prepared
    assert 4 not in chain.from_iterable(running.runner.batches)


def test_a_cancelled_image_leaves_the_queue(running: Running) -> None:
    running.runner.device_done.clear()  # two batches of four are under way, the rest queue
    jobs = range(1, 11)
    running.front.encode(*jobs)
    launched = running.runner.batches
    wait_until(
        lambda: (
            len(launched) == 2 and sum(map(len, launched)) + running.engine.num_ready == len(jobs)
        )
    )
    queued = next(job for job in jobs if job not in chain.from_iterable(launched))
    running.front.send(CancelImage(queued))
    assert running.front.codes(queued) == ["cancelled"]
    running.runner.device_done.set()
    assert running.front.codes(*(job for job in jobs if job != queued)) == [""] * 9
    assert queued not in chain.from_iterable(launched)


def test_an_image_is_prepared_and_waits_for_its_place(running: Running) -> None:
    for job_id in (1, 2):
        running.front.send(EncodeImage(job_id, Source(b"%d" % job_id), Unit(GRID)))
    wait_until(lambda: running.waiting_jobs() == [1, 2])
    running.front.send(PlaceImage(2, 0))
    assert running.front.codes(2) == [""] and running.runner.batches == [[2]]
    running.front.send(PlaceImage(2, 0), PlaceImage(1, 0))  # the first comes too late
    assert running.front.codes(1) == [""] and running.runner.batches == [[2], [1]]


def test_a_cancelled_image_does_not_wait_for_its_place(running: Running) -> None:
    running.front.send(EncodeImage(1, Source(b"1"), Unit(GRID)))
    wait_until(lambda: running.waiting_jobs() == [1])
    running.front.send(CancelImage(1))
    assert running.front.codes(1) == ["cancelled"]
    running.front.send(PlaceImage(1, 0))
    running.front.encode(2)
    assert running.front.codes(2) == [""] and running.runner.batches == [[2]]


def test_a_feature_is_announced_before_its_batch_is_done(running: Running) -> None:
    running.runner.features = [1, 2]
    running.runner.device_done.clear()
    running.front.encode(1)
    front = running.front
    front.receive_until(lambda: len(front.features) == 2)
    assert front.features == [([1], 1), ([1], 2)] and not front.done
    running.runner.device_done.set()
    assert front.codes(1) == [""]


def test_images_are_prepared_and_run_in_the_order_of_their_ranks(running: Running) -> None:
    runner, front = running.runner, running.front
    running.preprocessor.may_prepare.clear()
    running.preprocessor.blocked = (
        b"1"  # keeps its thread: of what two take in order, either may be done first
    )
    front.encode(1, 2)
    front.receive_until(lambda: front.active[-1:] == [[1, 2]])
    for job_id in (10, 11, 12, 13, 14):
        front.encode(job_id, rank=float(job_id), grid=LARGE)
    front.encode(20, rank=5.0, grid=LARGE)
    wait_until(lambda: running.engine.num_unprepared == 6)
    runner.may_run.clear()
    running.preprocessor.may_prepare.set()
    wait_until(lambda: len(running.preprocessor.prepared) == 7)
    assert running.preprocessor.prepared == [b"2", b"20", b"10", b"11", b"12", b"13", b"14"]
    runner.may_run.set()
    assert front.codes(2, 10, 11, 12, 13, 14, 20) == [""] * 7
    assert runner.batches == [[2], [20], [10], [11], [12], [13], [14]]
    running.preprocessor.release.set()
    assert front.codes(1) == [""]


def test_an_image_that_is_moved_is_prepared_in_its_new_order(running: Running) -> None:
    front, preprocessor = running.front, running.preprocessor
    block_one_thread(running)
    for job_id in (10, 11, 12):
        front.encode(job_id, rank=float(job_id), grid=LARGE)
    front.send(MoveImage(12, 1.0), MoveImage(2, 50.0), MoveImage(77, 0.0))
    front.encode(13, rank=13.0, grid=LARGE)
    wait_until(lambda: running.engine.num_unprepared == 4)
    preprocessor.may_prepare.set()
    assert front.codes(2, 10, 11, 12, 13) == [""] * 5
    assert preprocessor.prepared == [b"2", b"12", b"10", b"11", b"13"]


def test_an_image_that_is_moved_runs_in_its_new_order(running: Running) -> None:
    runner, front = running.runner, running.front
    occupy_device(running)
    for job_id in (10, 11, 12):
        front.encode(job_id, rank=float(job_id), grid=LARGE)
    wait_until(lambda: running.engine.num_ready == 3)
    front.send(MoveImage(12, 1.0), MoveImage(1, 50.0))
    front.encode(13, rank=13.0, grid=LARGE)
    wait_until(lambda: running.engine.num_ready == 4)
    runner.device_done.set()
    assert front.codes(1, 2, 10, 11, 12, 13) == [""] * 6
    assert runner.batches == [[1], [2], [12], [10], [11], [13]]


def test_an_image_that_is_moved_while_it_is_prepared_runs_in_its_new_order(
    running: Running,
) -> None:
    runner, front, preprocessor = running.runner, running.front, running.preprocessor
    occupy_device(running)
    preprocessor.blocked = b"12"
    for job_id in (12, 10, 11):
        front.encode(job_id, rank=float(job_id), grid=LARGE)
    wait_until(lambda: running.engine.num_ready == 2)
    front.send(MoveImage(12, 1.0))
    front.encode(13, rank=13.0, grid=LARGE)
    wait_until(lambda: running.engine.num_ready == 3)
    preprocessor.release.set()
    wait_until(lambda: running.engine.num_ready == 4)
    runner.device_done.set()
    assert front.codes(1, 2, 10, 11, 12, 13) == [""] * 6
    assert runner.batches == [[1], [2], [12], [10], [11], [13]]


def test_a_unit_of_a_video_that_is_moved_takes_the_units_before_it_along(running: Running) -> None:
    """A lane decodes frames in their order, so the unit waits for those before it."""
    front, preprocessor = running.front, running.preprocessor
    block_one_thread(running)
    video = Source(video=Video(MemoryAddress(0, 0, "clip", 0), (64, 64)))
    for job_id, frames in ((10, (0, 1)), (11, (4, 5)), (12, (6, 7))):
        image = EncodeImage(job_id, video, Unit(GRID, frames), 100.0 + job_id, "a")
        front.send(image, PlaceImage(job_id, 0))
    front.encode(20, 21, 22, rank=50.0)
    front.send(MoveImage(11, 1.0))
    front.encode(23, rank=60.0)
    wait_until(lambda: running.engine.num_unprepared == 5)  # the video's lane has one turn
    preprocessor.may_prepare.set()
    assert front.codes(2, 10, 11, 12, 20, 21, 22, 23) == [""] * 8
    assert preprocessor.decoded == [(0, 1), (4, 5), (6, 7)]
    assert preprocessor.prepared == [b"2", b"", b"", b"20", b"21", b"22", b"23", b""]


def occupy_device(running: Running) -> None:
    """Launches as many batches as may be in flight, which end when `device_done` is set."""
    running.runner.device_done.clear()
    running.front.encode(1)
    wait_until(lambda: running.runner.batches == [[1]])
    running.front.encode(2)
    wait_until(lambda: running.runner.batches == [[1], [2]])


def block_one_thread(running: Running) -> None:
    """Occupies both threads of the pool, one of them until the test ends. The other thread then
    takes what waits in order.
    """
    running.preprocessor.may_prepare.clear()
    running.preprocessor.blocked = b"1"
    running.front.encode(1, 2)
    running.front.receive_until(lambda: running.front.active[-1:] == [[1, 2]])


def test_the_loop_ends_when_the_front_closes_the_channel() -> None:
    running = Running()
    running.ends[0].close()
    running.thread.join(PATIENCE_S)
    assert not running.thread.is_alive()
    running.ends[1].close()


def test_messages_survive_the_wire() -> None:
    for message in (
        EncodeImage(1, Source(b"\x00\xff"), Unit((1, 2, 3))),
        PlaceImage(1, 4096),
        MoveImage(1, 0.5),
        CancelImage(1),
        Shutdown(),
    ):
        data = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(data, type=FrontMessage) == message


def test_on_a_cpu_an_image_has_no_batch_mates() -> None:
    """Their number would change the last bits of its embedding."""
    batcher = Batcher(batch_budget(torch.device("cpu")))
    for job_id in (1, 2, 3):
        batcher.add(job_id, 4)
    assert [batcher.next_batch() for _ in range(4)] == [[1], [2], [3], []]
    assert batch_budget(torch.device("cuda")) == MAX_BATCH_PATCHES
