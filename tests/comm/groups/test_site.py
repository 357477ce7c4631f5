"""What tells one host set from another."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.comm.groups import site as module
from syncline.comm.groups.site import Site, machine_identity
from syncline.errors import UserError
from syncline.lab.testbed import Cluster
from tests.comm.groups.choice_examples import HERE


@pytest.mark.parametrize("layout", [(), ((),), ((0, 2),), ((0,), (0, 1)), ((0,), ()), ((1, 2),)])
def test_ranks_that_cannot_be(layout: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(UserError, match=r"expected each of the ranks 0, 1, 2 \.\.\. on one host"):
        Site(route="auto", layout=layout, machines=("a",), names=("a",))


def test_names_of_hosts_make_no_difference_and_everything_else_does() -> None:
    def key(**others: object) -> str:
        kept = {"route": HERE.route, "layout": HERE.layout, "machines": ("a",), "names": ("here",)}
        return Site(**{**kept, **others}).key  # type: ignore[arg-type]

    assert key() == HERE.key == key(names=("renamed",))
    keys = {
        key(),
        key(route="ucx"),
        key(layout=((0, 1, 2),)),
        key(layout=((0,), (1,))),
        key(layout=((1, 0),)),
        key(machines=("b",)),
    }
    assert len(keys) == 6
    assert all(each.startswith(("auto-2-", "auto-3-", "ucx-2-")) for each in keys)


def test_a_machine_is_told_by_its_own_number_its_name_and_its_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "MACHINE_ID", tmp_path / "machine-id")
    monkeypatch.setattr(module, "DOMAIN", tmp_path / "domain")
    monkeypatch.setattr("socket.gethostname", lambda: name)
    name = "one"
    (tmp_path / "domain").write_text("(none)\n")
    found = {machine_identity()}  # without a machine-id, as in a container
    (tmp_path / "machine-id").write_text("f00d\n")
    found.add(machine_identity())
    name = "two"
    found.add(machine_identity())
    (tmp_path / "domain").write_text("syncline-1234\n")
    found.add(machine_identity())
    assert len(found) == 4
    assert found.isdisjoint({"f00d"})
    assert machine_identity() in found


def test_emulated_hosts_with_other_links_are_others() -> None:
    same = Cluster.of(hosts=2, rate="1gbit"), Cluster.of(hosts=2, rate="1000mbit")
    assert same[0].domain == same[1].domain
    others = {
        Cluster.of(hosts=2, rate="10gbit").domain,
        Cluster.of(hosts=2, rate="1gbit", latency="20us").domain,
        Cluster.of(hosts=2, rate="1gbit", hosts_rate=["1:2gbit"]).domain,
        same[0].domain,
    }
    assert len(others) == 4
    assert all(len(domain) <= 64 for domain in others)  # the most that the kernel takes
