"""Layouts are captured when they come again, and keep their place while they are used."""

from services.encoder.engine.frequent import FrequentLayouts


def seen(layouts: FrequentLayouts[str], *names: str | None) -> FrequentLayouts[str]:
    for name in names:
        layouts.see(name)
    return layouts


def test_a_layout_is_captured_at_its_second_sighting_and_once() -> None:
    layouts = seen(FrequentLayouts(room=2), "a", None, "b")
    assert layouts.next_capture() is None
    assert seen(layouts, "a").next_capture() == ("a", None)
    assert seen(layouts, "a", "a").next_capture() is None


def test_the_oldest_wish_comes_first() -> None:
    layouts = seen(FrequentLayouts(room=2), "a", "b", "b", "a", "a")
    assert [layouts.next_capture() for _ in range(3)] == [("b", None), ("a", None), None]


def test_a_layout_in_use_keeps_its_place() -> None:
    layouts = seen(FrequentLayouts(room=1, patience=10), "a", "a")
    layouts.next_capture()
    assert seen(layouts, "b", "b").next_capture() is None
    seen(layouts, *["b", "a"] * 20)
    assert layouts.next_capture() is None


def test_a_layout_out_of_use_gives_its_place_to_the_next() -> None:
    layouts = seen(FrequentLayouts(room=1, patience=10), "a", "a")
    layouts.next_capture()
    seen(layouts, *[None] * 10, "b", "b")
    assert layouts.next_capture() == ("b", "a")
    # "a" starts anew.
    assert seen(layouts, *[None] * 10, "a").next_capture() is None
    assert seen(layouts, "a").next_capture() == ("a", "b")


def test_many_layouts_take_no_memory_without_end() -> None:
    layouts: FrequentLayouts[str] = seen(FrequentLayouts(room=1), "kept", "kept")
    layouts.next_capture()
    seen(layouts, *(str(number) for number in range(5000)))
    assert len(layouts._entries) <= 1024 and layouts._entries["kept"].captured


def test_clear_forgets() -> None:
    layouts = seen(FrequentLayouts(room=1), "a", "a", "b", "b")
    layouts.next_capture()
    layouts.clear()
    assert layouts.next_capture() is None
    assert seen(layouts, "b", "b").next_capture() == ("b", None)
