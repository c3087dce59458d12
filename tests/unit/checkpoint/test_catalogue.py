"""Which checkpoints there are, and what may go: never the newest complete one."""

from __future__ import annotations

from quicoll.checkpoint.catalogue import complete, data_name, manifest_name, no_longer_needed


def files(*steps: int) -> list[str]:
    return [name for step in steps for name in (data_name(step, 0, "aa"), data_name(step, 1, "bb"))]


def test_a_checkpoint_is_complete_where_its_manifest_is_and_foreign_names_are_none() -> None:
    names = [*files(3, 7), manifest_name(7), manifest_name(100_000_000), manifest_name(12)]
    names += ["step-7.manifest.json", "step-000000007.manifest.json", "step-00000009.manifest.json.bak", "notes"]
    assert complete(names) == [7, 12, 100_000_000]


def test_the_newest_stay_and_what_has_no_manifest_goes_and_newer_ones_are_left_alone() -> None:
    names = [*files(1, 2, 3, 4, 5, 9), data_name(5, 1, "cc"), *map(manifest_name, (1, 2, 4, 5, 9)), "mine.txt"]
    doomed = no_longer_needed(names, step=5, keep=2, files=files(5))
    assert doomed.manifests == (manifest_name(1), manifest_name(2))
    assert sorted(doomed.data) == sorted([*files(1, 2, 3), data_name(5, 1, "cc")])


def test_the_one_that_was_just_completed_stays_whatever_else_there_is() -> None:
    names = [*files(5), manifest_name(5)]
    for keep in (-1, 0, 1):
        assert no_longer_needed(names, step=5, keep=keep, files=files(5)) == no_longer_needed(
            [], step=5, keep=1, files=[]
        )
    # its manifest is not seen in the listing yet
    assert no_longer_needed(files(5), step=5, keep=1, files=files(5)).data == ()
