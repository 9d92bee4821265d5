"""Nodes, relays, nonces and refusals."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, select

from protocol.messages import Heartbeat, NodeAccount, RegisterNode
from protocol.reasons import Reason, Refusal

from .states import PAID, RolloutState
from .tables import allowlist, credits, nodes, nonces, refusals, relays, rollouts

MAX_NONCES = 6000  # live nonces of one key: 50 requests a second for two minutes
RELAY_LIFE_SECONDS = 90.0


def remember_nonce(tx: Connection, key: str, nonce: str, expires: float, *, now: float) -> None:
    """Store a nonce until it can no longer be accepted. Raises Refusal (`nonce_replayed`, `nonce_limit`)."""
    tx.execute(delete(nonces).where(nonces.c.expires < now))
    seen = select(nonces.c.expires).where(nonces.c.key == key, nonces.c.nonce == nonce)
    if tx.execute(seen).one_or_none():
        raise Refusal(Reason.NONCE_REPLAYED)
    live = select(func.count()).select_from(nonces).where(nonces.c.key == key)
    if tx.execute(live).scalar_one() >= MAX_NONCES:
        raise Refusal(Reason.NONCE_LIMIT, retry_after=30)
    tx.execute(nonces.insert().values(key=key, nonce=nonce, expires=expires))


def allow(tx: Connection, node_id: str, label: str) -> None:
    """Put a node on the allowlist (idempotent)."""
    if tx.execute(select(allowlist.c.id).where(allowlist.c.id == node_id)).one_or_none() is None:
        tx.execute(allowlist.insert().values(id=node_id, label=label, banned=False))


def register(tx: Connection, node_id: str, body: RegisterNode, *, now: float) -> None:
    """Register a node of the allowlist, or bring its description up to date (idempotent).

    Raises Refusal (`not_on_allowlist`, `node_banned`).
    """
    admitted = tx.execute(select(allowlist.c.banned).where(allowlist.c.id == node_id)).one_or_none()
    if admitted is None:
        raise Refusal(Reason.NOT_ON_ALLOWLIST)
    if admitted.banned:
        raise Refusal(Reason.NODE_BANNED)
    described = {"software": body.software, "engine": body.engine, "device": body.device, "last_seen": now}
    changed = tx.execute(nodes.update().where(nodes.c.id == node_id).values(**described))
    if changed.rowcount == 0:
        tx.execute(nodes.insert().values(id=node_id, status="active", registered_at=now, **described))


def require(tx: Connection, node_id: str) -> None:
    """Raise Refusal (`unknown_node`, `node_banned`) unless the node may work."""
    query = (
        select(nodes.c.id, allowlist.c.banned)
        .join(allowlist, allowlist.c.id == nodes.c.id)
        .where(nodes.c.id == node_id)
    )
    row = tx.execute(query).one_or_none()
    if row is None:
        raise Refusal(Reason.UNKNOWN_NODE)
    if row.banned:
        raise Refusal(Reason.NODE_BANNED)


def heartbeat(tx: Connection, node_id: str, body: Heartbeat, *, now: float) -> None:
    """Record what a node says of itself (shown, never believed)."""
    tx.execute(
        nodes.update()
        .where(nodes.c.id == node_id)
        .values(
            last_seen=now,
            state=body.state,
            loaded_version=max(body.loaded_versions, default=None),
            tokens_per_second=body.tokens_per_second,
        )
    )


def add_backpressure(tx: Connection, node_id: str, seconds: float) -> None:
    """Time that a node spent being told `queue_full`."""
    tx.execute(
        nodes.update()
        .where(nodes.c.id == node_id)
        .values(backpressure_seconds=nodes.c.backpressure_seconds + seconds)
    )


def account(tx: Connection, node_id: str) -> NodeAccount:
    """Counts and credit of a node. Raises Refusal(`unknown_node`)."""
    node = tx.execute(select(nodes.c.status).where(nodes.c.id == node_id)).one_or_none()
    if node is None:
        raise Refusal(Reason.UNKNOWN_NODE)
    counts = select(rollouts.c.state, func.count()).where(rollouts.c.node_id == node_id).group_by(rollouts.c.state)
    by_state = {state: int(count) for state, count in tx.execute(counts)}
    total = select(func.coalesce(func.sum(credits.c.amount), 0)).where(credits.c.node_id == node_id)
    pending = (RolloutState.SUBMITTED, RolloutState.VERIFYING, RolloutState.INCONCLUSIVE)
    return NodeAccount(
        node_id=node_id,
        status=node.status,
        accepted=sum(by_state.get(state.value, 0) for state in PAID),
        rejected=by_state.get(RolloutState.REJECTED.value, 0),
        pending=sum(by_state.get(state.value, 0) for state in pending),
        dropped=by_state.get(RolloutState.EXPIRED.value, 0),
        credit=int(tx.execute(total).scalar_one()),
    )


def register_relay(tx: Connection, relay_id: str, url: str, *, now: float) -> None:
    """Register a relay, or renew its sign of life."""
    changed = tx.execute(relays.update().where(relays.c.id == relay_id).values(url=url, last_seen=now))
    if changed.rowcount == 0:
        tx.execute(relays.insert().values(id=relay_id, url=url, registered_at=now, last_seen=now))


def relay_urls(tx: Connection, *, now: float) -> tuple[str, ...]:
    """Relays that gave a sign of life lately, oldest registration first."""
    alive = select(relays.c.url).where(relays.c.last_seen >= now - RELAY_LIFE_SECONDS)
    return tuple(tx.execute(alive.order_by(relays.c.registered_at)).scalars())


def count_refusal(tx: Connection, reason: Reason) -> None:
    """Refusals change nothing but a counter."""
    changed = tx.execute(
        refusals.update().where(refusals.c.code == reason.value).values(count=refusals.c.count + 1)
    )
    if changed.rowcount == 0:
        tx.execute(refusals.insert().values(code=reason.value, count=1))


@dataclass(frozen=True)
class History:
    """Rollouts of a node: rejected, accepted since the last rejection, returned and dropped among its last 100."""

    rejected: int
    accepted_since: int
    returned: int
    dropped: int


def history(tx: Connection, node_id: str) -> History:
    """What a node has done so far, as far as its quota depends on it."""
    mine = rollouts.c.node_id == node_id
    rejections = select(func.max(rollouts.c.decided_at), func.count()).where(
        mine, rollouts.c.state == RolloutState.REJECTED.value
    )
    when, rejected = tx.execute(rejections).one()
    since = 0
    if rejected:
        paid = rollouts.c.state.in_([state.value for state in PAID])
        accepted = select(func.count()).where(mine, paid, rollouts.c.decided_at > when)
        since = int(tx.execute(accepted).scalar_one())
    no_return = (RolloutState.LEASED.value, RolloutState.VOID.value)
    last = select(rollouts.c.state).where(mine, rollouts.c.state.not_in(no_return))
    states = list(tx.execute(last.order_by(rollouts.c.id.desc()).limit(100)).scalars())
    dropped = states.count(RolloutState.EXPIRED.value)
    return History(int(rejected), since, len(states) - dropped, dropped)
