"""Tables of the ledger (SQLAlchemy Core). Times are Unix seconds; money is integers."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData()

meta = Table("meta", metadata, Column("key", String(64), primary_key=True), Column("value", Text, nullable=False))

nodes = Table(
    "nodes",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("status", String(16), nullable=False),
    Column("software", String(128), nullable=False),
    Column("engine", String(128), nullable=False),
    Column("device", String(128), nullable=False),
    Column("registered_at", Float, nullable=False),
    Column("last_seen", Float, nullable=False),
    Column("state", String(16), nullable=False, default="starting"),
    Column("loaded_version", BigInteger),
    Column("tokens_per_second", Float, nullable=False, default=0.0),
    Column("backpressure_seconds", Float, nullable=False, default=0.0),
)

allowlist = Table(
    "allowlist",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("label", String(128), nullable=False),
    Column("banned", Boolean, nullable=False, default=False),
)

relays = Table(
    "relays",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("url", String(512), nullable=False),
    Column("registered_at", Float, nullable=False),
    Column("last_seen", Float, nullable=False),
)

nonces = Table(
    "nonces",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("nonce", String(64), primary_key=True),
    Column("expires", Float, nullable=False, index=True),
)

problems = Table(
    "problems",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("environment", String(64), nullable=False),
    Column("environment_version", String(32), nullable=False),
    Column("number", Integer, nullable=False, unique=True),
    Column("messages", Text, nullable=False),
    Column("prompt", LargeBinary, nullable=False),
    Column("gold", Text, nullable=False),
)

groups = Table(
    "groups",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("problem_id", ForeignKey("problems.id"), nullable=False, index=True),
    Column("version", Integer, nullable=False),
    Column("size", Integer, nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("opened_at", Float, nullable=False),
    Column("settled_at", Float),
    Column("step", Integer, index=True),
)

slots = Table(
    "slots",
    metadata,
    Column("group_id", ForeignKey("groups.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("state", String(16), nullable=False),
    Column("fencing", Integer, nullable=False, default=0),
    Index("slots_by_state", "state", "group_id"),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("group_id", ForeignKey("groups.id"), nullable=False),
    Column("slot", Integer, nullable=False),
    Column("fencing", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("node_id", ForeignKey("nodes.id"), nullable=False),
    Column("lease_id", String(32), nullable=False, index=True),
    Column("state", String(16), nullable=False),
    Column("leased_at", Float, nullable=False),
    Column("deadline", Float, nullable=False),
    # submission: the signed body in the store, and which item of it
    Column("submitted_at", Float),
    Column("payload_hash", String(64)),
    Column("blob", String(64)),
    Column("position", Integer),
    # verification
    Column("claimed_by", String(64)),
    Column("claim_deadline", Float),
    Column("attempts", Integer, nullable=False, default=0),
    Column("decided_at", Float),
    Column("tokens", Integer),
    Column("reward", Float),
    Column("code", String(32)),
    Column("token_identical", Boolean),
    Column("price", BigInteger),
    Column("evidence", String(64)),
    Column("evidence_position", Integer),
    # training
    Column("step", Integer, index=True),
    Column("staleness_in_flight", Integer),
    Column("staleness", Integer),
    UniqueConstraint("group_id", "slot", "fencing"),
    Index("rollouts_by_state", "state", "version", "id"),
    Index("rollouts_by_node", "node_id", "state", "code", "token_identical"),
)

events = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("rollout_id", ForeignKey("rollouts.id"), nullable=False, index=True),
    Column("at", Float, nullable=False),
    Column("before", String(16)),
    Column("after", String(16), nullable=False),
    Column("actor", String(80), nullable=False),
    Column("detail", String(256), nullable=False, default=""),
)

verdicts = Table(
    "verdicts",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("rollout_id", ForeignKey("rollouts.id"), nullable=False, index=True),
    Column("attempt", Integer, nullable=False),
    Column("at", Float, nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("code", String(32)),
    Column("value", Float),
    Column("limit_value", Float),
    Column("measures", Text, nullable=False),
    Column("receipt", Text, nullable=False),
)

credits = Table(
    "credits",
    metadata,
    Column("sequence", Integer, primary_key=True, autoincrement=False),
    Column("rollout_id", ForeignKey("rollouts.id"), nullable=False),
    Column("node_id", ForeignKey("nodes.id"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("at", Float, nullable=False),
    Column("previous", String(64), nullable=False),
    Column("hash", String(64), nullable=False),
    UniqueConstraint("rollout_id", "kind"),
    Index("credits_by_node", "node_id", "amount"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("step", Integer, nullable=False),
    Column("name", String(32), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("weights_digest", String(64), nullable=False),
    Column("manifest_sha256", String(64), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("sealed_at", Float, nullable=False),
)

steps = Table(
    "steps",
    metadata,
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("version", Integer, nullable=False),  # the version the trainer held when it assembled the batch
    Column("assigned_at", Float, nullable=False),
    Column("confirmed_at", Float),
    Column("metrics", Text),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("at", Float, nullable=False),
    Column("passed", Integer, nullable=False),
    Column("total", Integer, nullable=False),
)

refusals = Table(
    "refusals",
    metadata,
    Column("code", String(32), primary_key=True),
    Column("count", Integer, nullable=False),
)

outages = Table(
    "outages",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("started", Float, nullable=False),
    Column("ended", Float, nullable=False),
)

samples = Table(
    "samples",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("source", String(16), nullable=False, index=True),
    Column("data", Text, nullable=False),
)
