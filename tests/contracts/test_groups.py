"""What pytest-xdist is relied on for: tests of one group run in one process, set up once."""

import pytest


@pytest.mark.xdist_group("grouped")
def test_where_tests_are_distributed_by_group_the_distributor_is_told_the_group(request):
    is_worker = hasattr(request.config, "workerinput")
    by_group = is_worker and request.config.getoption("loadgroup")
    assert request.node.nodeid.endswith("@grouped") == by_group
