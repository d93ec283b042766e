"""Connects to a Ray cluster and reserves resources; problems are one sentence, before anything is
loaded."""

from __future__ import annotations

import importlib
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mmrl.core.errors import UserError

SUPPORTED = "2.60"  # reads its log records, which are not a public interface
INSTALL = "pip install 'multimodal-rl[ray]'"
NAMESPACE = "mmrl"
OWNER = "MMRL_RAY_OWNER"  # owner of the resources that a process reserves
NAMES = {"CPU": "CPUs", "GPU": "GPUs"}
Bundle = Mapping[str, float]


def check_version() -> None:
    """Raise UserError if Ray is missing, or of another version."""
    try:
        installed = version("ray")
    except PackageNotFoundError as error:
        raise UserError(
            f"Ray is not installed, which --engine ray and place: ray need: {INSTALL}"
        ) from error
    if not (installed + ".").startswith(SUPPORTED + "."):
        raise UserError(
            f"Ray {installed} is installed, and mmrl works with Ray {SUPPORTED}: {INSTALL}, on "
            f"every machine of the cluster"
        )


def join(address: str | None = None, timeout: float = 60.0) -> Any:
    """Return the module ``ray``, connected: to ``address``, to RAY_ADDRESS, or to a new local
    cluster. In a worker of a cluster, and after the first call, it is already connected.

    Raises UserError if Ray is missing, of another version, or nothing answers at the address.
    """
    check_version()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics
    # silences a deprecation warning at every start of a worker
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray = importlib.import_module("ray")
    if ray.is_initialized():
        return ray
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address is not None:
        _check_address(address, min(timeout, 10.0))
    try:
        ray.init(
            address=address or "local",
            namespace=NAMESPACE,
            logging_level="ERROR",
            **({} if address else {"include_dashboard": False}),
        )
    except Exception as error:  # a node that is too slow to start raises plain Exception
        raise UserError(_unreachable(address, str(error))) from error
    return ray


def _check_address(address: str, timeout: float) -> None:
    """Raise UserError if nothing listens: Ray would retry for a minute, and print pages."""
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address.startswith("ray://") or not host or not port.isdigit():
        raise UserError(
            f"ray.address: expected host:port of a cluster's head, such as 10.0.0.1:6379, or auto; "
            f"got {address!r}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except OSError as error:
        raise UserError(_unreachable(address, error.strerror or str(error))) from error


def _unreachable(address: str | None, reason: str) -> str:
    reason = " ".join(reason.split())[:300]
    if address is None:
        return f"Ray could not be started on this machine: {reason}"
    return (
        f"no Ray cluster can be joined at {address} ({reason}); begin one there with `ray start "
        f"--head`, or give another ray.address or RAY_ADDRESS; one with tokens wants "
        f"RAY_AUTH_MODE=token here"
    )


def check_fit(ray: Any, bundles: Sequence[Bundle], what: str) -> None:
    """Raise UserError if the cluster could never hold the bundles, even if it were idle.

    ``what``: who needs them, in words.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for key in ("GPU", "CPU"):
        needed = sum(bundle.get(key, 0) for bundle in bundles)
        present = sum(node.get(key, 0) for node in nodes)
        largest = max((node.get(key, 0) for node in nodes), default=0)
        widest = max((bundle.get(key, 0) for bundle in bundles), default=0)
        if needed > present:
            raise UserError(
                f"{what} needs {needed:g} {NAMES[key]}, and the Ray cluster has {present:g} on "
                f"{len(nodes)} node{'s' * (len(nodes) != 1)}; ask for less, or add nodes "
                f"(ray start --address=...)"
            )
        if widest > largest:
            raise UserError(
                f"{what} needs {widest:g} {NAMES[key]} on one node, and the largest has "
                f"{largest:g}; ask for less of it, or add a larger node"
            )


def reserve(
    ray: Any, bundles: Sequence[Bundle], what: str, strategy: str = "PACK", timeout: float = 60.0
) -> Any:
    """Return a placement group with these bundles, reserved. Raises UserError if they do not fit,
    or are taken for ``timeout`` seconds."""
    check_fit(ray, bundles, what)
    util = importlib.import_module("ray.util")
    name = f"{os.environ.get(OWNER, '')}{uuid.uuid4().hex}"
    group = util.placement_group([dict(bundle) for bundle in bundles], strategy, name)
    if not group.wait(timeout):
        free = ray.available_resources()
        util.remove_placement_group(group)
        raise UserError(
            f"{what} found no place on the Ray cluster within {timeout:g} s: others use it "
            f"(free: {free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs); wait for them, ask "
            f"for less, or raise ray.timeout"
        )
    return group


def release(group: Any) -> None:
    """Release a placement group."""
    importlib.import_module("ray.util").remove_placement_group(group)


def release_left(owner: str) -> None:
    """Release what processes with ``owner`` in their environment have reserved and left behind.

    Ray keeps a group created by an actor until the whole job ends, even if the actor has died.
    """
    util = importlib.import_module("ray.util")
    for entry in util.placement_group_table().values():
        if entry["name"].startswith(owner) and entry["state"] != "REMOVED":
            util.remove_placement_group(util.get_placement_group(entry["name"]))


def strategy_of(group: Any, index: int = -1) -> Any:
    """Return the scheduling strategy of an actor inside a placement group; -1: any bundle."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )


def beside(ray: Any) -> Any:
    """Return the scheduling strategy of an actor on the node of this process."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    node = ray.get_runtime_context().get_node_id()
    return strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
