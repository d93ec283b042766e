"""One simulated cluster of three nodes for a module; whatever needs one is skipped where Ray is
absent."""

import os

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
STORE = 80 * 2**20  # bytes


def pytest_collection_modifyitems(items):
    for item in items:
        if "cluster" in item.path.parts and "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="module")
def cluster():
    """Three nodes of a core each, on this machine; this process is connected as the driver."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (multimodal-rl[ray])")
    from ray.cluster_utils import Cluster

    from mmrl.apps.ray.connection import NAMESPACE

    nodes = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "object_store_memory": STORE,
            "include_dashboard": False,
        },
    )
    for _ in range(2):
        nodes.add_node(num_cpus=1, object_store_memory=STORE)
    ray.init(address=nodes.address, namespace=NAMESPACE, logging_level="ERROR")
    yield nodes
    ray.shutdown()
    nodes.shutdown()
