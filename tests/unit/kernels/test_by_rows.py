from toka_async.kernels.by_rows import ByRows


def test_choices_by_rows() -> None:
    choices = ByRows([2, 8], ["few", "many"])
    assert [choices.find(num) for num in (0, 1, 2, 3, 8, 9)] == [None, "few", "few", "many", "many", None]
