import json
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any, Literal

import pytest

from regard.catalogue import from_record
from regard.errors import SpecError
from regard.nn.norm import Norm
from regard.nn.rms_norm import RMSNorm
from regard.presets import PRESETS
from regard.tree import Parts, Spec, diff, edit, get_at, hints, leaves, read, replace_at, swap, to_record, walk


@dataclass(frozen=True, slots=True)
class Leaf(Spec):
    kind = "leaf"
    size: int = 1
    rate: float = 0.5
    mode: Literal["near", "far"] = "near"
    flag: bool = False
    scale: float | Literal["sqrt", "none"] = "sqrt"

    def check(self) -> None:
        if self.size < 1:
            raise SpecError("size", f"must be at least 1, not {self.size}")


@dataclass(frozen=True, slots=True)
class Other(Spec):
    kind = "other"
    word: str = "w"


@dataclass(frozen=True, slots=True)
class Knot(Spec):
    kind = "knot"
    left: Leaf = Leaf()
    inner: "Knot | None" = None
    many: tuple[Leaf | Other, ...] = ()
    pair: tuple[int, int] = (1, 2)
    width: int = 4
    parts: int = 2
    anything: Any = None

    def check(self) -> None:
        if self.width % self.parts:
            raise SpecError("parts", f"{self.parts} does not divide {self.width}")


@dataclass(frozen=True, slots=True)
class Needy(Spec):
    kind = "needy"
    first: int
    second: Leaf
    third: int = 3


PARTS: Parts = {part.kind: part for part in (Leaf, Other, Knot, Needy)}
TREE = Knot(Leaf(2), Knot(many=(Leaf(3), Other("x"))), (Other(), Leaf(4)))


def complaint(record: Any, expected: type[Spec] = Spec) -> SpecError:
    with pytest.raises(SpecError) as raised:
        read(record, expected, "", PARTS)
    assert "\n" not in str(raised.value)
    return raised.value


def test_specs_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        TREE.width = 3  # type: ignore[reportAttributeAccessIssue]


class TestFields:
    def test_base_class_has_no_fields(self) -> None:
        assert hints(Spec) == {}
        assert list(hints(Leaf)) == ["size", "rate", "mode", "flag", "scale"]

    def test_int_becomes_float_and_list_becomes_tuple(self) -> None:
        assert type(Leaf(rate=1).rate) is float
        assert Knot(many=[Leaf()]).many == (Leaf(),)  # type: ignore[reportArgumentType]

    @pytest.mark.parametrize(
        ("field", "value", "words"),
        [
            ("size", True, "needs a whole number, not True (bool)"),
            ("size", 1.0, "needs a whole number, not 1.0 (float)"),
            ("size", "1", "needs a whole number, not '1' (str)"),
            ("rate", "0.5", "needs a number, not '0.5' (str)"),
            ("rate", True, "needs a number, not True (bool)"),
            ("rate", None, "needs a number, not None (NoneType)"),
            ("flag", 1, "needs true or false, not 1 (int)"),
            ("mode", "nera", "did you mean 'near'?"),
            ("mode", 3, "3 is not one of 'near', 'far'"),
            ("scale", "sqr", "did you mean 'sqrt'?"),
            ("scale", float("nan"), "not nan"),
            ("size", 0, "must be at least 1, not 0"),
        ],
    )
    def test_values_of_a_wrong_type_are_refused_on_construction(self, field: str, value: Any, words: str) -> None:
        with pytest.raises(SpecError) as raised:
            Leaf(**{field: value})
        assert raised.value.path == field
        assert words in str(raised.value)

    @pytest.mark.parametrize(
        ("field", "value", "path", "words"),
        [
            ("left", Other(), "left", "needs a spec of type Leaf, not Other()"),
            ("left", {"kind": "leaf"}, "left", "needs a spec of type Leaf"),  # not converted, because no record is read
            ("many", (Leaf(), Knot()), "many[1]", "needs a spec of type Leaf or a spec of type Other, not Knot()"),
            ("many", Leaf(), "many", "needs a list"),
            ("pair", (1, 2, 3), "pair", "needs 2 values, not 3"),
            ("pair", (1, 2.5), "pair[1]", "needs a whole number"),
            ("inner", 3, "inner", "needs a spec of type Knot or nothing (null), not 3 (int)"),
        ],
    )
    def test_wrong_parts_are_refused(self, field: str, value: Any, path: str, words: str) -> None:
        with pytest.raises(SpecError) as raised:
            Knot(**{field: value})
        assert raised.value.path == path
        assert words in str(raised.value)

    def test_error_names_any_other_type_by_its_annotation(self) -> None:
        @dataclass(frozen=True, slots=True)
        class Odd(Spec):
            kind = "odd"
            raw: bytes = b""
            named: dict[str, int] | None = None

        with pytest.raises(SpecError, match=r"^raw: needs bytes, not 'text' \(str\)"):
            Odd("text")  # type: ignore[reportArgumentType]
        with pytest.raises(SpecError, match=r"^named: needs dict\[str, int\] or nothing \(null\), not 3 \(int\)"):
            Odd(named=3)  # type: ignore[reportArgumentType]


class TestSwap:
    def test_replaces_by_type_everywhere(self) -> None:
        swapped = swap(TREE, Leaf, lambda leaf: replace(leaf, size=10 * leaf.size))
        assert swapped == Knot(Leaf(20), Knot(Leaf(10), many=(Leaf(30), Other("x"))), (Other(), Leaf(40)))

    def test_may_change_the_type(self) -> None:
        swapped = swap(TREE, Other, lambda other: Leaf(len(other.word)))
        assert swapped.many == (Leaf(1), Leaf(4))

    def test_replaces_subclasses_of_a_slot(self) -> None:
        kinds: list[str] = []
        swap(PRESETS["bert_base"](), Norm, lambda norm: kinds.append(norm.kind) or norm)
        assert set(kinds) == {"layer_norm", "no_norm"}

    def test_inner_parts_first(self) -> None:
        order: list[int] = []

        def visit(knot: Knot) -> Knot:
            order.append(knot.width)
            return replace(knot, width=knot.width + (0 if knot.inner is None else knot.inner.width))

        swapped = swap(Knot(inner=Knot(inner=Knot(width=2), width=4), width=8), Knot, visit)
        assert order == [2, 4, 8]
        assert swapped.width == 14  # each knot is visited after its inner knot

    def test_returns_the_same_tree_if_nothing_changes(self) -> None:
        assert swap(TREE, Needy, lambda needy: needy) is TREE
        assert swap(TREE, Leaf, lambda leaf: leaf) is TREE

    def test_keeps_unchanged_parts(self) -> None:
        swapped = swap(TREE, Leaf, lambda leaf: Leaf(9) if leaf.size == 4 else leaf)
        assert swapped.many[1] == Leaf(9)
        assert swapped.inner is TREE.inner
        assert swapped.left is TREE.left
        assert swapped.many[0] is TREE.many[0]

    def test_refuses_a_part_of_another_slot(self) -> None:
        with pytest.raises(SpecError, match="left: needs a spec of type Leaf"):
            swap(TREE, Leaf, lambda _: Other())


class TestEdit:
    def test_by_path(self) -> None:
        edited = replace_at(TREE, "inner.many[0].rate", 2)
        assert edited == replace(TREE, inner=Knot(many=(Leaf(3, 2.0), Other("x"))))
        assert edited.left is TREE.left

    def test_index_from_the_end(self) -> None:
        assert replace_at(TREE, "many[-1].size", 7).many == (Other(), Leaf(7))

    def test_whole_parts(self) -> None:
        assert replace_at(TREE, "many[0]", Leaf(8)).many == (Leaf(8), Leaf(4))
        assert replace_at(TREE, "inner", None).inner is None
        assert replace_at(TREE, "many", [Leaf(8)]).many == (Leaf(8),)

    def test_accepts_records_and_kind_names_with_parts(self) -> None:
        assert replace_at(TREE, "many[0]", "leaf", PARTS).many == (Leaf(), Leaf(4))
        assert replace_at(TREE, "left", {"kind": "leaf", "size": 6}, PARTS).left == Leaf(6)
        with pytest.raises(SpecError, match="left: needs a spec of type Leaf"):
            replace_at(TREE, "left", {"kind": "leaf"})

    def test_changes_apply_together(self) -> None:
        with pytest.raises(SpecError, match="parts: 3 does not divide 4"):
            replace_at(TREE, "parts", 3)
        edited = edit(TREE, {"parts": 3, "width": 9, "inner.parts": 5, "inner.width": 5, "many[0].word": "z"})
        assert (edited.width, edited.parts) == (9, 3)
        assert edited.inner == Knot(many=(Leaf(3), Other("x")), width=5, parts=5)
        assert edited.many == (Other("z"), Leaf(4))

    def test_a_part_and_a_field_in_it(self) -> None:
        edited = edit(TREE, {"inner.many[0].size": 5, "inner": Knot(many=(Leaf(rate=2.0),))})
        assert edited.inner == Knot(many=(Leaf(5, 2.0),))

    @pytest.mark.parametrize(
        ("path", "value", "where", "words"),
        [
            ("inner.many[0].siz", 1, "inner.many[0].siz", "unknown key 'siz' in 'leaf'; did you mean 'size'?"),
            ("inner.many[0].size", True, "inner.many[0].size", "needs a whole number, not True (bool)"),
            ("inner.many[0].size", 0, "inner.many[0].size", "must be at least 1, not 0"),
            ("inner.many[7]", Leaf(), "inner.many[7]", "only 2 entries"),
            ("inner.many[-3]", Leaf(), "inner.many[-3]", "only 2 entries"),
            ("inner[0]", Leaf(), "inner[0]", "inner is not a list"),
            ("[0]", Leaf(), "[0]", "is not a path"),
            ("inner..many", 1, "inner..many", "is not a path"),
            ("inner.", 1, "inner.", "is not a path"),
            ("inner.many.size", 1, "inner.many.size", "has no fields"),
            ("width.size", 1, "width.size", "width is 4 (int) and has no fields"),
            ("inner.parts", 3, "inner.parts", "3 does not divide 4"),
            ("inner.many[1]", Knot(), "inner.many[1]", "needs a spec of type Leaf or a spec of type Other"),
            ("inner many", 1, "inner many", "is not a path"),
            ("", 1, "", "is not a path"),
        ],
    )
    def test_errors_have_the_path(self, path: str, value: Any, where: str, words: str) -> None:
        with pytest.raises(SpecError) as raised:
            replace_at(TREE, path, value)
        assert raised.value.path == where
        assert words in str(raised.value)

    def test_get_at(self) -> None:
        assert get_at(TREE, "inner.many[0].size") == 3
        assert get_at(TREE, "many[-1]") == Leaf(4)
        with pytest.raises(SpecError, match=r"inner\.mani: unknown key .* did you mean 'many'"):
            get_at(TREE, "inner.mani")


class TestRecords:
    @pytest.mark.parametrize("name", PRESETS)
    def test_every_preset_round_trips_through_json(self, name: str) -> None:
        spec = PRESETS[name]()
        record = json.loads(json.dumps(to_record(spec)))
        assert from_record(record) == spec
        assert to_record(from_record(record)) == record

    def test_a_record_is_complete_and_plain(self) -> None:
        assert to_record(Knot(many=(Other(),))) == {
            "kind": "knot",
            "left": {"kind": "leaf", "size": 1, "rate": 0.5, "mode": "near", "flag": False, "scale": "sqrt"},
            "inner": None,
            "many": [{"kind": "other", "word": "w"}],
            "pair": [1, 2],
            "width": 4,
            "parts": 2,
            "anything": None,
        }

    def test_round_trip(self) -> None:
        assert read(json.loads(json.dumps(to_record(TREE))), Knot, "", PARTS) == TREE

    def test_defaults_may_be_omitted_and_a_kind_alone_means_all_defaults(self) -> None:
        assert read({"kind": "knot", "many": ["leaf", {"kind": "other"}]}, Knot, "", PARTS) == Knot(
            many=(Leaf(), Other())
        )

    @pytest.mark.parametrize(
        ("record", "path", "words"),
        [
            ({"kind": "leaf", "sise": 1}, "sise", "unknown key 'sise' in 'leaf'; did you mean 'size'?"),
            ({"kind": "leav"}, "kind", "unknown kind 'leav'; did you mean 'leaf'?"),
            ({"kind": 3}, "kind", "needs a string, not 3 (int)"),
            ({"kind": ["leaf"]}, "kind", "needs a string, not ['leaf'] (list)"),
            ({"size": 3}, "kind", "is missing; known names: 'knot', 'leaf', 'needy', 'other'"),
            ({"kind": "leaf", 3: 4}, "3", "unknown key 3 in 'leaf'"),
            ([1], "", "needs a table with a kind, not [1] (list)"),
            ({"kind": "needy", "first": 1}, "second", "is missing; 'needy' has no default for it"),
            ({"kind": "needy", "second": "leaf"}, "first", "is missing; 'needy' has no default for it"),
            ({"kind": "leaf", "size": True}, "size", "needs a whole number, not True (bool)"),
            ({"kind": "leaf", "rate": "1"}, "rate", "needs a number, not '1' (str)"),
            ({"kind": "leaf", "size": -1}, "size", "must be at least 1, not -1"),
            ({"kind": "knot", "left": "other"}, "left.kind", "'other' is not a Leaf; known names: 'leaf'"),
            ({"kind": "knot", "left": 3}, "left", "needs a spec of type Leaf, not 3 (int)"),
            ({"kind": "knot", "many": "leaf"}, "many", "needs a list, not 'leaf' (str)"),
            ({"kind": "knot", "inner": {"kind": "knot", "many": ["leaf", "othr"]}}, "inner.many[1].kind", "'othr'"),
            (
                {
                    "kind": "knot",
                    "inner": {"kind": "knot", "inner": {"kind": "knot", "many": [{"kind": "leaf", "x": 1}]}},
                },
                "inner.inner.many[0].x",
                "unknown key 'x' in 'leaf'",
            ),
            ({"kind": "knot", "inner": {"kind": "knot", "parts": 3}}, "inner.parts", "3 does not divide 4"),
        ],
    )
    def test_errors_have_the_full_path(self, record: Any, path: str, words: str) -> None:
        error = complaint(record)
        assert error.path == path
        assert words in str(error)

    def test_a_kind_of_another_slot_is_refused_at_the_root(self) -> None:
        assert "'other' is not a Leaf" in str(complaint({"kind": "other"}, Leaf))

    def test_code_is_refused_unless_trusted(self) -> None:
        name = "regard.nn.rms_norm:RMSNorm"
        record = {"kind": "knot", "anything": None, "left": {"kind": name}}
        error = complaint(record)
        assert error.path == "left.kind"
        assert "--trust-code" in str(error)
        assert read({"kind": name, "eps": 0.5}, Norm, "", {}, trust=True) == RMSNorm(0.5)

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("no_such_module:Thing", "cannot import"),
            ("regard.nn.norm:Nothing", "has no 'Nothing'"),
            (":Thing", "cannot import"),
            ("regard.nn.norm:Norm", "is not a Norm spec"),  # the base class itself
            ("regard.nn.mask:Mask", "is not a Norm spec"),
            ("json:dumps", "is not a Norm spec"),
        ],
    )
    def test_trusted_code_must_be_a_part_of_the_slot(self, name: str, words: str) -> None:
        with pytest.raises(SpecError, match=words) as raised:
            read({"kind": name}, Norm, "norm", {}, trust=True)
        assert raised.value.path == "norm.kind"


class TestDiff:
    def test_of_equal_trees_is_empty(self) -> None:
        assert diff(TREE, swap(TREE, Leaf, replace)) == []

    def test_reports_the_highest_part_that_differs(self) -> None:
        edited = edit(TREE, {"inner.many[0].size": 5, "left": Leaf(2, 0.75), "inner.many[1]": Leaf(), "pair": (1, 3)})
        assert diff(TREE, edited) == [
            ("left.rate", 0.5, 0.75),
            ("inner.many[0].size", 3, 5),
            ("inner.many[1]", Other("x"), Leaf()),
            ("pair[1]", 2, 3),
        ]

    def test_of_lists_of_unequal_length_shows_both(self) -> None:
        assert diff(TREE, replace(TREE, many=())) == [("many", TREE.many, ())]


def test_leaves_list_every_path_once_and_agree_with_get_at() -> None:
    values = dict(leaves(TREE))
    assert values["kind"] == "knot"
    assert values["inner.many[1].kind"] == "other"
    assert values["inner.many[0].size"] == 3
    assert values["pair[1]"] == 2
    assert len(values) == len(list(leaves(TREE)))
    for path, value in values.items():
        if not path.endswith("kind"):
            assert get_at(TREE, path) == value


def test_walk_yields_every_part_root_first() -> None:
    assert [type(part) for part in walk(Knot(many=(Leaf(1), Leaf(2))))] == [Knot, Leaf, Leaf, Leaf]
