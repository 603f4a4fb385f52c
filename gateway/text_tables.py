"""The table of prompts and answers that organisations have stored. Empty unless one asks for it."""

import sqlalchemy as sa

from gateway.tables import METADATA, organisation

_MOMENT = sa.DateTime(timezone=True)

stored_text = sa.Table(
    "stored_text",
    METADATA,
    sa.Column("organisation_id", sa.Text, sa.ForeignKey(organisation.c.id), primary_key=True),
    sa.Column("request_id", sa.Uuid, primary_key=True),
    sa.Column("at", _MOMENT, nullable=False),  # arrival
    sa.Column("asked_with", sa.Uuid, nullable=False),  # whose row has the prompt: a body may ask several requests
    sa.Column("prompt", sa.LargeBinary, nullable=False),  # the body as the client sent it
    sa.Column("prompt_cut", sa.Boolean, nullable=False),
    sa.Column("answer", sa.LargeBinary, nullable=False),  # JSON: a list of gateway.schemas.choices.Choice
    sa.Column("answer_cut", sa.Boolean, nullable=False),
    sa.Column("broken", sa.Text, nullable=False),  # why the answer is not whole; empty = it is
    sa.Index("ix_stored_text_organisation_id_at", "organisation_id", "at"),
)
