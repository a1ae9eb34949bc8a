"""Pages of the cache: found again by what they hold, freed when nobody needs them, given up oldest first."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inference.cache.pages import BEGINNING, PAGE_TOKENS, PagePool

A, B, C = ((letter,) * PAGE_TOKENS for letter in (1, 2, 3))


def chain(pool: PagePool, *contents: tuple[int, ...]) -> list[int]:
    """The pages of a sequence with these contents, as an engine would come by them."""
    pages: list[int] = []
    for tokens in contents:
        before = pages[-1] if pages else BEGINNING
        found = pool.find(before, tokens)
        if found is None:
            pages.append(pool.share(pool.take(), before, tokens))
        else:
            pool.hold(found)
            pages.append(found)
    return pages


def test_a_page_is_found_only_after_the_same_beginning() -> None:
    pool = PagePool(8)
    first, second = chain(pool, A, B)
    assert pool.find(BEGINNING, A) == first
    assert pool.find(first, B) == second
    assert pool.find(BEGINNING, B) is None
    assert pool.find(second, B) is None
    assert pool.find(BEGINNING - 1, A) is None
    (other,) = chain(pool, C)
    assert pool.find(other, B) is None


def test_sequences_that_begin_alike_hold_the_same_pages() -> None:
    pool = PagePool(8)
    one, two = chain(pool, A, B), chain(pool, A, C)
    assert one[0] == two[0] and one[1] != two[1]
    assert pool.used == 3
    assert pool.holders(one[0]) == 2
    pool.release(one)
    assert one == [] and pool.used == 2 and pool.idle == 1
    pool.release(two)
    assert pool.used == 0 and pool.idle == 3 and pool.available == 8


def test_the_least_recently_used_pages_are_given_up_first_and_chains_from_their_end() -> None:
    pool = PagePool(5)
    old, new = chain(pool, A, B), chain(pool, C, A)
    first_old, first_new = old[0], new[0]
    pool.release(old)
    pool.release(new)
    taken = [pool.take() for _ in range(2)]  # one is free, the other was B after A
    assert pool.find(BEGINNING, A) == first_old and pool.find(first_old, B) is None
    taken.append(pool.take())
    assert pool.find(BEGINNING, A) is None
    assert pool.find(BEGINNING, C) == first_new and pool.find(first_new, A) is not None
    pool.release(taken)
    assert pool.used == 0


def test_use_keeps_a_page_from_being_given_up() -> None:
    pool = PagePool(2)
    for content in (A, B, A):
        pool.release(chain(pool, content))
    pool.take()
    assert pool.find(BEGINNING, A) is not None and pool.find(BEGINNING, B) is None


def test_the_page_with_the_longest_common_beginning_is_found_and_copied() -> None:
    copies: list[tuple[int, int]] = []
    pool = PagePool(3, copy=lambda source, target: copies.append((source, target)))
    far, near = (*A[:5], *B[5:]), (*A[:9], *B[9:])
    held = [*chain(pool, far), *chain(pool, near)]
    assert pool.nearest(BEGINNING, A) == (9, held[1])
    assert pool.nearest(held[0], A)[0] == 0
    pool.release(held)
    one = pool.take()
    own = pool.take_copy(pool.nearest(BEGINNING, A)[1])
    assert copies == [(pool.nearest(BEGINNING, A)[1], own)]
    assert pool.nearest(BEGINNING, A)[0] == 9  # the other one has been given up
    pool.release([one, own])
    pool.forget_idle()
    assert pool.nearest(BEGINNING, A)[0] == 0


def test_a_page_made_twice_is_kept_once() -> None:
    pool = PagePool(4)
    one = pool.share(pool.take(), BEGINNING, A)
    own = pool.take()
    assert pool.share(own, BEGINNING, A) == one
    assert pool.holders(one) == 2 and pool.used == 1


def test_a_page_whose_beginning_was_given_up_is_not_found_under_the_same_tokens_made_anew() -> None:
    pool = PagePool(4)
    pages = chain(pool, A, B)
    pool.spoil(pages[:1])
    (again,) = chain(pool, A)
    assert again != pages[0]
    assert pool.find(again, B) is None


def test_spoiled_pages_are_never_found_and_are_zeroed_once_their_last_holder_leaves() -> None:
    cleared: list[int] = []
    pool = PagePool(4, cleared.extend)
    one, two = chain(pool, A, B), chain(pool, A)
    shared, own = one
    pool.spoil(one)
    pool.release(one)
    assert cleared == [own]
    assert pool.find(BEGINNING, A) is None
    pool.release(two)
    assert cleared == [own, shared]
    assert pool.used == pool.idle == 0


def test_idle_pages_are_bounded_and_can_be_forgotten() -> None:
    pool = PagePool(8, keep=2)
    pool.release(chain(pool, A, B, C))
    assert pool.idle == 2 and pool.available == 8
    pool.forget_idle()
    assert pool.idle == 0 and pool.available == 8 and pool.find(BEGINNING, A) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=4)), max_size=30)
)
def test_holders_are_counted_right_whatever_happens(acts: list[tuple[int, list[tuple[int, ...]]]]) -> None:
    pool = PagePool(12, keep=5)
    held: list[list[int]] = []
    for act, contents in acts:
        if act and pool.available >= len(contents):
            held.append(chain(pool, *contents))
        elif held:
            pool.release(held.pop(act % len(held)))
        counts = {page: sum(page in pages for pages in held) for pages in held for page in pages}
        assert all(pool.holders(page) == count for page, count in counts.items())
        assert pool.used == len(counts)
        assert pool.used + pool.available == pool.total
    while held:
        pool.release(held.pop())
    assert pool.used == 0 and pool.available == 12
