"""Real models with one wire moved: each slip is found by a finding or by the snapshot of the wiring, and the message names the place."""

from __future__ import annotations

import pytest
import torch

import gradlineage
from gradlineage.errors import WiringError
from tests.mutants import BLIND, BUILD, MUTANTS, look, traced

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("title", MUTANTS)
def test_slip_is_found_and_its_place_named(title: str) -> None:
    mutant = MUTANTS[title]
    seen = look(mutant)
    assert seen.new or seen.changed, "nothing was found"
    assert mutant.place in seen.text
    assert seen.codes == sorted(mutant.codes)
    assert bool(seen.changed) == mutant.wiring


def test_there_are_thirty_of_them_from_three_libraries() -> None:
    assert len(MUTANTS) >= 30
    assert {m.model for m in MUTANTS.values()} == set(BUILD)


@pytest.mark.parametrize("title", MUTANTS)
def test_finding_of_a_slip_points_into_the_source(title: str) -> None:
    """Where a finding has a place, that is in the edited block, or where the module was called."""
    for finding in look(MUTANTS[title]).new:
        if finding.where:
            file, _, line = finding.where.rpartition(":")
            assert line.isdigit() and file.endswith(".py")
        assert finding.message and finding.hint and not finding.message.endswith(".")


@pytest.mark.xfail(strict=True, reason="a lineage says from which layer a tensor comes, not which part of it")
@pytest.mark.parametrize("title", BLIND)
def test_slip_within_a_tensor_is_found(title: str) -> None:
    seen = look(BLIND[title])
    assert seen.new or seen.changed


@pytest.mark.parametrize("name", BUILD)
def test_model_as_it_is_differs_from_itself_in_nothing(name: str) -> None:
    first, second = traced(name), traced(name)
    assert gradlineage.lint(first) == gradlineage.lint(second)
    assert str(first.to_table()) == str(second.to_table())


def test_skip_that_was_dropped_fails_what_is_expected_of_the_block() -> None:
    wiring = {"layer1.0.relu[1]": "add(layer1.0.bn2, maxpool)", "layer1.0:add": ["layer1.0.bn2", "maxpool"]}
    traced("resnet18").expect(wiring)
    with pytest.raises(WiringError, match=r"expected add\(layer1.0.bn2, maxpool\)\n    found    layer1.0.bn2"):
        traced("resnet18", MUTANTS["a skip is dropped"].change).expect({"layer1.0.relu[1]": wiring["layer1.0.relu[1]"]})
