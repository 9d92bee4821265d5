"""JSON messages of the control plane (/v1). Every model refuses unknown fields, coercion and NaN."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from .manifest import Count
from .reasons import Reason
from .runspec import RunSpec
from .signed import Hex64, Signed, Strict

Text = Annotated[str, StringConstraints(max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Url = Annotated[str, StringConstraints(max_length=512, pattern=r"^https?://[!-~]+$")]
SeedHex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]


class Problem(Strict):
    """RFC 9457 problem details; `code` is a reason code."""

    type: str
    title: str
    status: int
    detail: str
    code: Reason


class RunInfo(Strict):
    """Answer of `GET /v1/run`. `newest` is None until version 0 is published; `now` in Unix seconds."""

    run_key: Hex64
    run_spec: RunSpec
    run_spec_digest: Hex64
    newest: Count | None
    relays: tuple[str, ...]
    log_head: str | None
    now: float


class RegisterNode(Strict):
    """Body of `POST /v1/nodes`; the key that signs the request is the one registered."""

    software: Text
    engine: Text
    device: Text
    invite: Text | None = None
    puzzle: Text | None = None


class NodeAccount(Strict):
    """Answer of `POST /v1/nodes` and `GET /v1/nodes/me`. Credit in integer units."""

    node_id: Hex64
    status: Literal["active", "probation", "banned"]
    accepted: Count
    rejected: Count
    pending: Count
    dropped: Count
    credit: int


class RegisterRelay(Strict):
    """Body of `POST /v1/relays`: where the relay serves."""

    url: Url


class RelayChallenge(Strict):
    """What a relay signs with its own key (kind `relay`) when the coordinator asks for it at the registered URL."""

    relay_id: Hex64
    url: Url
    nonce: Text


class Heartbeat(Strict):
    """Body of `POST /v1/heartbeat`: what the node is doing. Nothing in it decides anything."""

    state: Literal["starting", "fetching", "generating", "waiting", "draining"]
    loaded_versions: tuple[Count, ...]
    open_leases: Count
    spooled: Count
    tokens_per_second: Annotated[float, Field(ge=0, lt=1e12)]


class Directives(Strict):
    """Answer to a heartbeat. Data only: a coordinator can never make a node run or fetch code."""

    newest: Count | None
    relays: tuple[str, ...]
    drain: bool
    upgrade: Text | None


class LeaseRequest(Strict):
    """Body of `POST /v1/leases`. `versions` are those that the node has loaded; new groups open on the newest of them
    only. The answer is held back up to `wait_seconds` until there is work. `possession` proves possession of the
    weights (empty for now)."""

    versions: Annotated[tuple[Count, ...], Field(min_length=1, max_length=64)]
    slots: Annotated[int, Field(ge=1, le=512)]
    wait_seconds: Annotated[float, Field(ge=0, le=20)]
    possession: Text = ""


class LeaseSlot(Strict):
    """A slot of the lease: index in the group, fencing number, sampling seed as 16 hex digits."""

    index: Count
    fencing: Count
    seed: SeedHex


class Lease(Strict):
    """Slots of one group for one node. `deadline` in Unix seconds by the server's clock."""

    lease_id: Text
    version: Count
    weights_digest: Hex64
    run_spec_digest: Hex64
    prompt: tuple[Count, ...]
    slots: tuple[LeaseSlot, ...]
    temperature: float
    max_tokens: Count
    deadline: float


class LeaseAnswer(Strict):
    """Answer of `POST /v1/leases`: at least one lease."""

    leases: tuple[Lease, ...]
    now: float


class Acknowledgement(Strict):
    """What became of one completion of a batch: acknowledged (with its rollout id), or refused with a code."""

    lease_id: Text
    fencing: Count
    index: Count
    payload_hash: Hex64
    rollout_id: Count | None
    code: Reason | None
    log_deadline: float | None = None


class RolloutsAnswer(Strict):
    """Answer of `POST /v1/rollouts`, in the order of the batch; signed as a whole with the answer."""

    items: tuple[Acknowledgement, ...]


class Receipt(Strict):
    """The verdict on one rollout, signed by the run key (kind `receipt`). `value` and `limit` belong to `code`."""

    run_id: str
    run_spec_digest: Hex64
    rollout_id: Count
    node_id: Hex64
    payload_hash: Hex64
    verdict: Literal["accepted", "rejected", "unverified", "unverifiable"]
    code: Reason | None
    value: float | None
    limit: float | None
    price: Count
    evidence_sha256: Hex64
    salt: Hex64
    created: float


class ReceiptAnswer(Strict):
    """Answer of `GET /v1/receipts/{rollout id}`."""

    receipt: Signed
