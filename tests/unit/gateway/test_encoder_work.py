"""The division of images among encoders by work in seconds."""

import random
from dataclasses import dataclass, field

from services.gateway.clients.encoder_work import EncoderShares, EncoderWork


@dataclass
class Encoder:
    address: str
    work: EncoderWork = field(default_factory=EncoderWork)


def encoders(count: int, *speeds: float) -> list[Encoder]:
    found = [Encoder(f"10.0.0.{number}:1") for number in range(count)]
    for encoder, patch_s in zip(found, speeds, strict=False):
        encoder.work.patch_s = patch_s
    return found


def divided(found: list[Encoder], sizes: list[tuple[int, int]]) -> dict[str, float]:
    """Seconds of new work for each encoder."""
    shares, seconds = EncoderShares(found, sizes), dict.fromkeys((e.address for e in found), 0.0)
    for number, size in sorted(enumerate(sizes), key=lambda each: each[1], reverse=True):
        chosen = shares.take(b"%d" % number, size)
        seconds[chosen.address] += chosen.work.cost(*size)
    return seconds


def test_images_are_divided_by_patches_and_not_by_number() -> None:
    rng = random.Random(0)
    for _ in range(200):
        found = encoders(rng.randint(2, 6))
        sizes = [(rng.choice((256, 1024, 4096, 16384)), 0) for _ in range(16)]
        seconds = divided(found, sizes).values()
        cost = found[0].work.cost
        share = sum(cost(*size) for size in sizes) / len(found)
        # An encoder takes images until it has its share.
        assert max(seconds) < share + cost(max(sizes)[0], 0)


def test_sixteen_equal_images_take_two_encoders_half_the_time() -> None:
    for seed in range(50):
        found = encoders(2)
        shares, chosen = EncoderShares(found, [(4096, 1000)] * 16), []
        for number in range(16):
            chosen.append(shares.take(b"%d %d" % (seed, number), (4096, 1000)).address)
        assert [*map(chosen.count, sorted(set(chosen)))] == [8, 8]


def test_a_lone_image_goes_to_the_first_encoder_in_its_order() -> None:
    found = encoders(4)
    for number in range(50):
        key = b"%d" % number
        first = EncoderShares(found, [(4096, 0)]).take(key, (4096, 0))
        assert EncoderShares(found[::-1], [(64, 9)]).take(key, (64, 9)) is first


def test_work_under_way_counts_in_seconds_with_its_bytes() -> None:
    found = encoders(2)
    with found[0].work.under_way(16384, 0, 0.0):
        assert all(divided(found, [(256, 0)] * 4)[found[0].address] == 0 for _ in range(4))
    with found[0].work.under_way(0, 60 << 20, 0.0):
        assert divided(found, [(256, 0)] * 4)[found[0].address] == 0
    assert found[0].work.seconds == 0


def test_a_fast_encoder_gets_more() -> None:
    found = encoders(2, 1e-6, 4e-6)
    sizes = [(1024, 0)] * 50
    shares = EncoderShares(found, sizes)
    chosen = [shares.take(b"%d" % number, (1024, 0)).address for number in range(50)]
    # Both get half of the seconds, as far as the mean of the speeds predicts them.
    assert chosen.count(found[0].address) >= 3 * chosen.count(found[1].address)


def test_the_decoding_of_clips_counts_for_clips_alone() -> None:
    found = encoders(2)
    with found[0].work.under_way(64, 0, 2.0):
        for number in range(20):
            shares = EncoderShares(found, [(0, 1000)], with_clips=True)
            assert shares.take(b"%d" % number, (0, 1000)) is found[1]
        images = {EncoderShares(found, [(4096, 0)]).take(b"%d" % n, (4096, 0)).address
                  for n in range(20)}  # fmt: skip
    assert len(images) == 2
    assert found[0].work.clip_s == 0
