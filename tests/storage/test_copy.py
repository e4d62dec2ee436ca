from millrace.storage.copy import newest_first, sort_files, without_runs


def test_files_are_sorted_by_checkpoint():
    contents = sort_files(
        [
            "config.yml",
            "report/1.json",
            "checkpoints/update-000000007/manifest.json",
            "checkpoints/update-000000007/state/a",
            "checkpoints/average/manifest.json",
            "checkpoints/update-000000008/state/a",  # not complete
            "checkpoints/update-000000009.1a2b.partial/manifest.json",
            "checkpoints/update-000000003.damaged/manifest.json",
            ".remote.json",
        ]
    )
    assert contents.others == {"config.yml", "report/1.json"}
    assert contents.checkpoints == {
        "checkpoints/update-000000007": {
            "checkpoints/update-000000007/manifest.json",
            "checkpoints/update-000000007/state/a",
        },
        "checkpoints/average": {"checkpoints/average/manifest.json"},
    }


def test_runs_in_subfolders_are_left_to_themselves():
    names = ["config.yml", "repeat-0/config.yml", "repeat-0/metrics.jsonl", "repeats.txt"]
    assert without_runs(names) == {"config.yml", "repeats.txt"}


def test_checkpoints_are_ordered_by_their_number():
    names = ["c/update-1000000000", "c/average", "c/update-999999999"]
    assert newest_first(names) == ["c/update-1000000000", "c/update-999999999", "c/average"]
