"""KV blocks that leave the cache of the device, and come back from the host's memory."""

import random

import pytest

from services.decoder.engine.messages import ImageSpan, ResetPrefixCache
from services.decoder.engine.schedule.host_slots import HostSlots
from services.decoder.engine.step import ComputeStep
from tests.engine_harness import KEYS, Harness, prompt_of
from tests.engine_programs import fail_at
from tests.fake_runner import add_message
from tests.integrity import check_host_slots

SIZE = 4  # tokens of a block


def answer(harness: Harness, number: int, prompt: list[int], salt: bytes = b"") -> int:
    """Runs a sequence alone; the number of its prompt tokens that were cached."""
    hits = harness.engine.stats().num_prefix_hit_tokens
    harness.add(add_message(number, prompt, max_tokens=2, salt=salt))
    harness.run()
    return harness.engine.stats().num_prefix_hit_tokens - hits


@pytest.mark.parametrize("overlap", [False, True])
def test_a_conversation_returns_after_its_blocks_were_given_away(overlap: bool) -> None:
    harness = Harness(num_blocks=16, num_host_blocks=64, overlap=overlap)
    for number in range(4):
        assert answer(harness, number, prompt_of(number, 48)) == 0
    assert answer(harness, 4, prompt_of(0, 48)) == 44  # all blocks but that of the last token
    stats = harness.engine.stats()
    assert stats.num_blocks_from_host == 11 and stats.num_blocks_to_host > 30
    harness.assert_all_as_alone()
    harness.assert_empty()


def test_without_slots_nothing_is_copied() -> None:
    harness = Harness(num_blocks=16)
    for number in range(4):
        answer(harness, number, prompt_of(number, 48))
    assert answer(harness, 4, prompt_of(0, 48)) == 0
    assert harness.engine.stats().num_blocks_to_host == 0


def test_a_block_that_the_host_has_is_not_copied_again() -> None:
    harness = Harness(num_blocks=16, num_host_blocks=64)
    for number in range(12):
        answer(harness, number, prompt_of(number % 3, 48))
    # 12 or 13 blocks of each prompt, with that of the completion, and never twice the same.
    assert harness.engine.stats().num_blocks_to_host <= 3 * 13
    assert harness.engine.stats().num_blocks_from_host > 50
    harness.assert_all_as_alone()


def test_another_tenant_finds_nothing() -> None:
    harness = Harness(num_blocks=16, num_host_blocks=64)
    answer(harness, 0, prompt_of(0, 48), salt=b"a")
    for number in range(1, 4):
        answer(harness, number, prompt_of(number, 48))
    assert answer(harness, 4, prompt_of(0, 48), salt=b"b") == 0
    assert answer(harness, 5, prompt_of(0, 48), salt=b"a") == 44


def test_a_reset_forgets_the_copies() -> None:
    harness = Harness(num_blocks=16, num_host_blocks=64)
    for number in range(4):
        answer(harness, number, prompt_of(number, 48))
    harness.engine.handle(ResetPrefixCache())
    assert answer(harness, 4, prompt_of(0, 48)) == 0
    harness.assert_all_as_alone()


def test_a_poisoned_prompt_is_not_found_on_the_host() -> None:
    harness = Harness(num_blocks=16, num_host_blocks=64)
    for number in range(4):
        answer(harness, number, prompt_of(number, 48))
    blocks = harness.engine.scheduler.blocks
    sequence = add_message(9, prompt_of(0, 48), max_tokens=2)
    harness.add(sequence)
    harness.step()
    (running,) = harness.engine.scheduler.running()
    known = [each in blocks.host.slot_of for each in running.block_hashes]
    assert any(known)
    blocks.invalidate(running)
    assert not any(each in blocks.host.slot_of for each in running.block_hashes)
    check_host_slots(blocks.host)


def test_a_step_that_was_planned_ahead_saves_the_blocks_that_it_takes() -> None:
    """Other ranks get the step when it is planned, not when it is launched."""
    harness = Harness(num_blocks=16, num_host_blocks=64, plans=True, mask_after=1)
    for number in range(4):
        answer(harness, number, prompt_of(number, 8))
    harness.add(add_message(4, prompt_of(4, 8), max_tokens=48, token_masks=True))
    harness.run()
    stats = harness.engine.stats()
    assert stats.num_blocks_to_host > 4 and harness.runner.num_as_prepared > 4
    for number in range(4):
        assert answer(harness, 5 + number, prompt_of(number, 8) + prompt_of(9, 2)) == 8
    harness.assert_all_as_alone()


def test_a_poisoned_prompt_is_not_found_although_its_sequence_was_preempted_meanwhile() -> None:
    """Its blocks are in the prefix cache, and not its own any more, when its token arrives."""
    harness = Harness(num_blocks=8, num_host_blocks=64)
    harness.runner.poisoned = {KEYS[0]}
    harness.add(add_message(0, prompt_of(0, 7), max_tokens=9))
    image = (ImageSpan(KEYS[0], 4, 6),)
    harness.add(add_message(1, prompt_of(1, 24), images=image, max_tokens=2))
    (_, second) = harness.engine.sequences.values()
    harness.step()
    harness.step()
    assert second.num_preemptions == 1 and harness.ends == {1: "failed"}
    blocks = harness.engine.scheduler.blocks
    assert len(second.block_hashes) == 6
    assert not any(blocks.block_of.get(h) or blocks.host.find(h) for h in second.block_hashes)


def test_an_admission_that_takes_saved_blocks_saves_nothing_in_its_step() -> None:
    """A step copies the blocks of the sequence before it, beside its computation. The cache holds
    two conversations of three.
    """
    harness = Harness(num_blocks=30, num_host_blocks=64)
    steps: list[ComputeStep] = []
    harness.runner.on_execute = lambda step: steps.append(step.compute)
    for number in range(9):
        assert answer(harness, number, prompt_of(number % 3, 48)) == (44 if number > 2 else 0)
    assert all(step.block_saves is None for step in steps)
    assert sum(step.idle_block_saves is not None for step in steps) >= 3
    host = harness.engine.scheduler.blocks.host
    assert host.num_saved >= 3 * 12 and host.num_loaded >= 3 * 11
    harness.assert_all_as_alone()


def test_fewer_slots_than_blocks_are_for_what_the_device_has_lost() -> None:
    harness = Harness(num_blocks=16, num_host_blocks=12)
    steps: list[ComputeStep] = []
    harness.runner.on_execute = lambda step: steps.append(step.compute)
    for number in range(4):
        answer(harness, number, prompt_of(number, 48))
    assert all(step.idle_block_saves is None for step in steps)
    assert harness.engine.stats().num_blocks_to_host > 12


def test_what_was_offered_is_saved_a_few_at_a_time() -> None:
    host = HostSlots(6, 5)
    for number in range(4):
        host.offer(b"%d" % number, number)
    host.drop(b"1")
    host.save(b"2", 2)  # given away before its turn
    host.plan_idle_saves(1)
    host.plan_idle_saves(1)  # the step was planned again
    saves, _, idle = host.copies()
    assert saves is not None and saves.tolist() == [[2, 0]]
    assert idle is not None and idle.tolist() == [[0, 1]]
    assert host.find(b"0") is None, "not written yet"
    host.save(b"0", 0)  # given away by a step that was planned once more
    saves, _, idle = host.copies()
    assert saves is not None and saves.tolist() == [[2, 0], [0, 1]] and idle is None
    check_host_slots(host)
    host.launched()
    host.plan_idle_saves(4)
    host.failed()
    host.launched()
    assert list(host.slot_of) == [b"2", b"0"] and host.num_saved == 2 and not host.offered
    check_host_slots(host)


def crowd(seed: int, num_host_blocks: int, *, failing: bool) -> Harness:
    """Forty sequences over six beginnings, several at once, in a cache that holds one or two."""
    chance = random.Random(seed)
    harness = Harness(
        num_blocks=chance.randint(16, 24), num_host_blocks=num_host_blocks,
        overlap=chance.random() < 0.5, max_num_sequences=3,
    )  # fmt: skip
    if failing:
        fail_at(harness.runner, chance.randint(5, 60))
    for number in range(40):
        prompt = prompt_of(chance.randrange(6), chance.choice((24, 32, 40)))
        prompt += prompt_of(100 + number, chance.randrange(4))
        harness.add(add_message(number, prompt, max_tokens=chance.randint(1, 9)))
        for _ in range(chance.randrange(6)):
            harness.step()
    harness.run()
    return harness


@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_of_sequences_alone(seed: int) -> None:
    harness = crowd(seed, 12 if seed % 2 else 60, failing=seed % 3 == 0)
    harness.assert_all_as_alone()
    harness.assert_empty()
    assert list(harness.ends.values()).count("failed") <= 1
    assert harness.engine.stats().num_blocks_from_host > 10


def _forgets_what_is_not_written(host: HostSlots, block_hash: bytes) -> int | None:
    slot = host.slot_of.get(block_hash)
    return None if slot is None else -1 - slot


RULES = {
    "claim": lambda *_: None,  # slots that are about to be read may be given away
    "failed": lambda _: None,  # saves of a step that failed count as made
    "find": _forgets_what_is_not_written,
}


@pytest.mark.parametrize("rule", RULES)
def test_an_answer_is_wrong_if_a_rule_is_dropped(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostSlots, rule, RULES[rule])

    def wrong(seed: int) -> bool:
        try:
            harness = crowd(seed, 12, failing=rule != "claim")
            harness.assert_all_as_alone()
        except (AssertionError, KeyError):
            return True
        return False

    assert any(wrong(seed) for seed in range(60))


def test_slots_are_reused_least_recently_used_first_and_not_while_a_step_uses_them() -> None:
    host = HostSlots(2)
    host.save(b"1", 10)
    host.save(b"2", 11)
    host.save(b"3", 12)  # both slots are used by the next step
    assert list(host.slot_of) == [b"1", b"2"]
    assert host.find(b"1") is None, "not written yet"
    host.launched()
    found = host.find(b"1")
    assert found == -1
    host.claim([5, found])
    host.load(b"1", 20)
    host.save(b"3", 12)
    assert list(host.slot_of) == [b"1", b"3"]
    saves, loads, _ = host.copies()
    assert saves is not None and saves.tolist() == [[12, 1]]
    assert loads is not None and loads.tolist() == [[20, 0]]
    host.failed()
    saves, repeated, _ = host.copies()
    assert saves is None and repeated is not None and repeated.tolist() == loads.tolist()
    assert host.find(b"3") is None
    host.launched()
    assert host.copies() == (None, None, None) and host.num_loaded == 1
    check_host_slots(host)


def test_a_block_that_is_not_loaded_yet_is_not_saved() -> None:
    """The launch of its step has failed, and its copy was dropped, because a prompt was poisoned
    that had the same contents in another block.
    """
    host = HostSlots(2)
    host.save(b"1", 10)
    host.launched()
    host.load(b"1", 20)
    host.failed()
    host.drop(b"1")
    host.save(b"1", 20)  # the block is given away
    assert host.find(b"1") is None and host.copies()[0] is None
    host.launched()
    assert not host.slot_of
    check_host_slots(host)
