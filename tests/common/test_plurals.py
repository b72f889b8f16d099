from structured_ensembles.common.plurals import counted


def test_nouns_agree_with_their_number():
    assert counted(0, "epoch") == "0 epochs"
    assert counted(1, "epoch") == "1 epoch"
    assert counted(2, "epoch") == "2 epochs"
    assert counted(1438, "sample") == "1,438 samples"


def test_nouns_with_another_plural():
    assert [counted(number, "class") for number in (1, 2)] == ["1 class", "2 classes"]
    assert [counted(number, "batch") for number in (1, 2)] == ["1 batch", "2 batches"]
    assert [counted(number, "index", "indices") for number in (1, 2)] == ["1 index", "2 indices"]
