from __future__ import annotations

import torch

from toka_async.model.matrices.part import WeightPart, make_unset
from toka_async.model.matrices.share import Share, whole_of


def test_a_rank_cuts_its_part_out_and_keeps_its_address() -> None:
    parameter = make_unset(2, 3)
    part = WeightPart(parameter.data[:, 1:], (Share(4, 2, 2), whole_of(2)))
    whole = torch.arange(8.0).view(part.shape)
    before = parameter.data_ptr()
    part.write(part.cut(whole).double())
    assert parameter[:, 1:].tolist() == [[4, 5], [6, 7]]
    assert parameter.data_ptr() == before
    assert not parameter.requires_grad
    assert not part.is_whole


def test_a_part_may_have_no_values_on_a_rank() -> None:
    """So that the rank knows the name of a tensor that others have."""
    part = WeightPart(make_unset(0, 2), (Share(4, 0, 0), whole_of(2)))
    part.write(part.cut(torch.ones(part.shape)))
    assert part.shape == (4, 2)


def test_a_part_may_store_values_in_its_own_way() -> None:
    target, stored = make_unset(2, 2), list[torch.Tensor]()
    WeightPart(target.data, (whole_of(2), whole_of(2)), store=stored.append).write(torch.ones(2, 2))
    assert [values.tolist() for values in stored] == [[[1, 1], [1, 1]]]
