"""How the CTAs of a grid are dealt out to a semaphore's words: the formulas of kernels/grid.py on plain numbers."""

from __future__ import annotations

from collections import Counter

from fusednorm.kernels.grid import WORD_BYTES, WORDS, group_of, group_size, groups_with_members
from hypothesis import given
from hypothesis import strategies as st

from fusednorm import semaphore

members = st.integers(1, 5000)
adjacent = st.sampled_from([1, 2, 4, 8])
groups = st.sampled_from([1, 2, WORDS])


@given(members, adjacent, groups)
def test_a_group_has_as_many_members_as_are_dealt_out_to_it(members, adjacent, groups):
    sizes = Counter(group_of.fn(member, adjacent, groups) for member in range(members))
    assert [group_size.fn(group, members, adjacent, groups) for group in range(groups)] == [
        sizes[group] for group in range(groups)
    ]


@given(members, adjacent, groups)
def test_the_groups_that_have_members_are_the_first(members, adjacent, groups):
    used = {group_of.fn(member, adjacent, groups) for member in range(members)}
    assert used == set(range(groups_with_members.fn(members, adjacent, groups)))


@given(members, adjacent, groups)
def test_a_group_s_first_member_is_known_from_its_number(members, adjacent, groups):
    first = {}
    for member in range(members):
        first.setdefault(group_of.fn(member, adjacent, groups), member)
    assert all(member == group * adjacent for group, member in first.items())


@given(members, adjacent, groups)
def test_shares_make_every_word_one_turn_further_and_no_word_seems_done_before(members, adjacent, groups):
    words = [7 << 16] * WORDS
    for member in reversed(range(members)):
        group = group_of.fn(member, adjacent, groups)
        size = group_size.fn(group, members, adjacent, groups)
        words[group] += 65537 - size if member == group * adjacent else 1
        done = member == group * adjacent  # the others have come before it
        assert (words[group] >> 16 == 8) == done and (words[group] % 65536 == 0) == done
    unused = range(groups_with_members.fn(members, adjacent, groups), WORDS)
    assert all(words[group] == 7 << 16 for group in unused)
    assert all(words[group] == 8 << 16 for group in range(WORDS) if group not in unused)


def test_a_semaphore_has_room_for_its_words():
    assert semaphore.SIZE * 4 == WORDS * WORD_BYTES
