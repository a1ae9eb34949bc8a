"""The tree against Certificate Transparency's published vectors and RFC 9162's recursive definition."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from governance.ledger import tree
from governance.ledger.tree import NodeId

# The eight reference entries and roots that Certificate Transparency implementations test against.
REFERENCE_LEAVES = [
    bytes.fromhex(entry)
    for entry in [
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    ]
]
REFERENCE_ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


class Store:
    """Complete nodes in memory, counting how many are read."""

    def __init__(self, entries: Sequence[bytes]) -> None:
        self.nodes: dict[NodeId, bytes] = {}
        self.reads = 0
        frontier = tree.Frontier()
        for index, entry in enumerate(entries):
            self.nodes[NodeId(0, index)] = tree.leaf_hash(entry)
            self.nodes.update(frontier.append(tree.leaf_hash(entry)))
        self.frontier = frontier

    def __call__(self, wanted: Sequence[NodeId], /) -> Mapping[NodeId, bytes]:
        self.reads += len(wanted)
        return {node: self.nodes[node] for node in wanted if node in self.nodes}


def rfc_root(entries: Sequence[bytes]) -> bytes:
    """MTH of RFC 9162, 2.1.1, word for word."""
    if not entries:
        return hashlib.sha256(b"").digest()
    if len(entries) == 1:
        return hashlib.sha256(b"\x00" + entries[0]).digest()
    k = rfc_split(len(entries))
    return hashlib.sha256(b"\x01" + rfc_root(entries[:k]) + rfc_root(entries[k:])).digest()


def rfc_split(n: int) -> int:
    k = 1
    while k * 2 < n:
        k *= 2
    return k


def rfc_path(m: int, entries: Sequence[bytes]) -> list[bytes]:
    """PATH of RFC 9162, 2.1.3.1."""
    if len(entries) == 1:
        return []
    k = rfc_split(len(entries))
    if m < k:
        return [*rfc_path(m, entries[:k]), rfc_root(entries[k:])]
    return [*rfc_path(m - k, entries[k:]), rfc_root(entries[:k])]


def rfc_subproof(m: int, entries: Sequence[bytes], known: bool) -> list[bytes]:
    """SUBPROOF of RFC 9162, 2.1.4.1."""
    n = len(entries)
    if m == n:
        return [] if known else [rfc_root(entries)]
    k = rfc_split(n)
    if m <= k:
        return [*rfc_subproof(m, entries[:k], known), rfc_root(entries[k:])]
    return [*rfc_subproof(m - k, entries[k:], False), rfc_root(entries[:k])]


entries_lists = st.integers(1, 130).map(lambda n: [b"entry %d" % i for i in range(n)])


@pytest.mark.parametrize("size", range(9))
def test_reference_roots_of_certificate_transparency(size: int) -> None:
    store = Store(REFERENCE_LEAVES[:size])
    assert tree.root(size, store).hex() == REFERENCE_ROOTS[size]
    assert store.frontier.root().hex() == REFERENCE_ROOTS[size]


def test_reference_inclusion_and_consistency_proofs() -> None:
    store = Store(REFERENCE_LEAVES)
    assert [h.hex() for h in tree.inclusion_proof(5, 8, store)] == [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]
    assert [h.hex() for h in tree.consistency_proof(6, 8, store)] == [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]


@given(entries_lists, st.data())
def test_inclusion_proofs_equal_the_rfc_definition_and_verify(entries: list[bytes], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(entries) - 1))
    proof = tree.inclusion_proof(index, len(entries), Store(entries))
    assert proof == rfc_path(index, entries)
    assert tree.verify_inclusion(tree.leaf_hash(entries[index]), index, len(entries), proof, rfc_root(entries))


@given(entries_lists, st.data())
def test_consistency_proofs_equal_the_rfc_definition_and_verify(entries: list[bytes], data: st.DataObject) -> None:
    old_size = data.draw(st.integers(1, len(entries)))
    proof = tree.consistency_proof(old_size, len(entries), Store(entries))
    assert proof == rfc_subproof(old_size, entries, True)
    old_root, new_root = rfc_root(entries[:old_size]), rfc_root(entries)
    assert tree.verify_consistency(old_size, len(entries), proof, old_root, new_root)


@given(entries_lists, st.data())
def test_a_wrong_leaf_index_size_or_hash_does_not_verify(entries: list[bytes], data: st.DataObject) -> None:
    size = len(entries)
    index = data.draw(st.integers(0, size - 1))
    proof = tree.inclusion_proof(index, size, Store(entries))
    leaf, expected = tree.leaf_hash(entries[index]), rfc_root(entries)
    other = data.draw(st.integers(-1, size + 1).filter(lambda i: i != index))
    assert not tree.verify_inclusion(leaf, other, size, proof, expected)
    assert not tree.verify_inclusion(tree.leaf_hash(b"another"), index, size, proof, expected)
    assert not tree.verify_inclusion(leaf, index, size, [*proof, b"\0" * 32], expected)
    if proof:
        assert not tree.verify_inclusion(leaf, index, size, proof[:-1], expected)
        at = data.draw(st.integers(0, len(proof) - 1))
        bent = [*proof[:at], bytes([proof[at][0] ^ 1]) + proof[at][1:], *proof[at + 1 :]]
        assert not tree.verify_inclusion(leaf, index, size, bent, expected)


@given(st.integers(2, 80), st.data())
def test_a_rewritten_history_has_no_consistency_proof(size: int, data: st.DataObject) -> None:
    entries = [b"entry %d" % i for i in range(size)]
    old_size = data.draw(st.integers(1, size - 1))
    rewritten = list(entries)
    rewritten[data.draw(st.integers(0, old_size - 1))] = b"rewritten"
    proof = tree.consistency_proof(old_size, size, Store(rewritten))
    assert not tree.verify_consistency(old_size, size, proof, rfc_root(entries[:old_size]), rfc_root(rewritten))


@given(st.integers(0, 70), st.integers(0, 70))
def test_a_tree_grown_from_its_stored_edge_equals_one_grown_at_once(first: int, more: int) -> None:
    entries = [b"entry %d" % i for i in range(first + more)]
    store = Store(entries[:first])
    frontier = tree.Frontier.load(first, store)
    nodes = dict(store.nodes)
    for index in range(first, first + more):
        nodes[NodeId(0, index)] = tree.leaf_hash(entries[index])
        nodes.update(frontier.append(tree.leaf_hash(entries[index])))
    assert nodes == Store(entries).nodes
    assert frontier.root() == rfc_root(entries)


def test_proofs_read_a_logarithmic_number_of_nodes() -> None:
    store = Store([b"%d" % i for i in range(5000)])
    store.reads = 0
    tree.inclusion_proof(1234, 4999, store)
    tree.consistency_proof(2047, 4999, store)
    assert store.reads <= 2 * 2 * 13


def test_several_proofs_cost_one_read() -> None:
    calls = 0
    store = Store([b"%d" % i for i in range(100)])

    def read(wanted: Sequence[NodeId], /) -> Mapping[NodeId, bytes]:
        nonlocal calls
        calls += 1
        return store(wanted)

    proofs = tree.inclusion_proofs([0, 50, 99], 100, read)
    assert calls == 1
    assert proofs == [tree.inclusion_proof(i, 100, store) for i in (0, 50, 99)]


def test_a_missing_node_is_named() -> None:
    store = Store([b"%d" % i for i in range(8)])
    del store.nodes[NodeId(1, 2)]
    with pytest.raises(tree.MissingNodeError, match="level 1, position 2"):
        tree.inclusion_proof(7, 8, store)


@pytest.mark.parametrize(("index", "size"), [(-1, 5), (5, 5), (0, 0)])
def test_a_leaf_outside_the_tree_is_refused(index: int, size: int) -> None:
    with pytest.raises(tree.TreeRangeError):
        tree.inclusion_proof(index, size, Store([b"x"] * 5))


def test_consistency_at_the_borders() -> None:
    store = Store([b"%d" % i for i in range(5)])
    five = tree.root(5, store)
    assert tree.consistency_proof(0, 5, store) == []
    assert tree.verify_consistency(0, 5, [], tree.EMPTY_ROOT, five)
    assert not tree.verify_consistency(0, 5, [], five, five)
    assert tree.verify_consistency(5, 5, [], five, five)
    assert not tree.verify_consistency(5, 5, [five], five, five)
    assert not tree.verify_consistency(6, 5, [], five, five)
    assert not tree.verify_consistency(3, 5, [], five, five)
    with pytest.raises(tree.TreeRangeError):
        tree.consistency_proof(6, 5, store)
