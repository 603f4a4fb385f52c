"""Second factors: one-time codes of an app (TOTP, RFC 6238), and recovery codes. The SQL on both tables.

1. `begin` makes a secret, which is shown as a picture and as text; it counts for nothing until `confirm` saw a code.
2. `confirm` gives ten recovery codes. They are shown this once and stored as hashes; each works once.
3. `check` takes a code of the present period of 30 s, or of its neighbours, for clocks differ. The newest period used
   is kept, so no code and no older one works a second time, whichever gateway is asked.
4. Who lost both asks an operator: `remove` by somebody else is in the record of changes under their name.
"""

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import pyotp
import segno
import sqlalchemy as sa
from markupsafe import Markup
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from contracts.errors import ServingError
from gateway.audit import record
from gateway.people_tables import recovery_code, second_factor
from gateway.tables import organisation

PERIOD_S: Final = 30
RECOVERY_CODES: Final = 10
_RECOVERY_BYTES: Final = 10
_AROUND: Final = (0, -1, 1)
BY_CODE, BY_RECOVERY = "code", "recovery"


class AlreadyThere(ServingError):
    """A second factor is in force; it has to be taken away first."""

    code, type, http_status = "second_factor_in_force", "invalid_request_error", 409


class Enrolment(msgspec.Struct, frozen=True, kw_only=True):
    """What an app is shown, once."""

    secret: str  # base32
    address: str  # otpauth://totp/...

    @property
    def picture(self) -> Markup:
        """Return the address as a QR code: SVG to put into a page, black on white in every theme.

        Nothing that people write is in it as text: modules only.
        """
        code = segno.make(self.address, error="m")
        return Markup(code.svg_inline(scale=4, border=4, dark="#000", light="#fff", svgclass=None, lineclass=None))  # noqa: S704

    @property
    def groups(self) -> str:
        """Return the secret in fours, to be typed."""
        return " ".join(self.secret[i : i + 4] for i in range(0, len(self.secret), 4))


class Factors:
    """Repository of second factors. Each call is one transaction."""

    def __init__(self, engine: AsyncEngine, *, now_s: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._now_s = now_s

    async def in_force(self, person_id: str) -> bool:
        """Return whether a person has one that was confirmed."""
        mine = sa.and_(second_factor.c.person_id == person_id, second_factor.c.confirmed_at.is_not(None))
        async with self._engine.begin() as db:
            return (await db.execute(sa.select(second_factor.c.person_id).where(mine))).one_or_none() is not None

    async def recovery_left(self, person_id: str) -> int:
        """Return how many recovery codes were not used yet."""
        mine = sa.and_(recovery_code.c.person_id == person_id, recovery_code.c.used_at.is_(None))
        query = sa.select(sa.func.count()).select_from(recovery_code).where(mine)
        async with self._engine.begin() as db:
            return int((await db.execute(query)).scalar_one())

    async def begin(self, person_id: str, *, account: str) -> Enrolment:
        """Return a fresh secret, in place of one that was never confirmed. Raises AlreadyThere."""
        secret = pyotp.random_base32()
        wanted = insert(second_factor).values(person_id=person_id, secret=secret)
        wanted = wanted.on_conflict_do_update(
            index_elements=["person_id"],
            set_={"secret": secret, "last_step": 0, "created_at": sa.func.now()},
            where=second_factor.c.confirmed_at.is_(None),
        )
        async with self._engine.begin() as db:
            if not (await db.execute(wanted)).rowcount:
                raise AlreadyThere("A second factor is in force. Turn it off before you set another one up.")
        return enrolment_of(secret, account)

    async def pending(self, person_id: str, *, account: str) -> Enrolment | None:
        """Return what waits to be confirmed."""
        mine = sa.and_(second_factor.c.person_id == person_id, second_factor.c.confirmed_at.is_(None))
        async with self._engine.begin() as db:
            secret = (await db.execute(sa.select(second_factor.c.secret).where(mine))).scalar_one_or_none()
        return enrolment_of(secret, account) if secret else None

    async def confirm(self, person_id: str, code: str) -> Sequence[str] | None:
        """Put a secret in force and return the recovery codes; None when the code is wrong."""
        async with self._engine.begin() as db:
            if not await self._takes(db, person_id, code, confirmed=False):
                return None
            mine = second_factor.c.person_id == person_id
            await db.execute(sa.update(second_factor).where(mine).values(confirmed_at=sa.func.now()))
            await record(db, actor=person_id, action="second_factor_set", kind="person", subject=person_id, org=None)
            return await _new_codes(db, person_id)

    async def check(self, person_id: str, code: str) -> str | None:
        """Use a code up; return by what it was, BY_CODE or BY_RECOVERY, None when it is neither."""
        async with self._engine.begin() as db:
            if await self._takes(db, person_id, code, confirmed=True):
                return BY_CODE
            mine = sa.and_(
                recovery_code.c.person_id == person_id,
                recovery_code.c.code_hash == _hash(person_id, code),
                recovery_code.c.used_at.is_(None),
            )
            used = await db.execute(sa.update(recovery_code).where(mine).values(used_at=sa.func.now()))
            if not used.rowcount:
                return None
            await record(db, actor=person_id, action="recovery_code_used", kind="person", subject=person_id, org=None)
        return BY_RECOVERY

    async def renew_codes(self, person_id: str) -> Sequence[str]:
        """Return new recovery codes; the old ones are worth nothing."""
        async with self._engine.begin() as db:
            await record(
                db, actor=person_id, action="recovery_codes_renewed", kind="person", subject=person_id, org=None
            )
            return await _new_codes(db, person_id)

    async def remove(self, person_id: str, *, actor: str) -> bool:
        """Take a second factor away, with its recovery codes; False when there was none in force."""
        mine = second_factor.c.person_id == person_id
        async with self._engine.begin() as db:
            gone = await db.execute(sa.delete(second_factor).where(mine).returning(second_factor.c.confirmed_at))
            confirmed = gone.scalar_one_or_none() is not None
            if confirmed:
                await record(
                    db, actor=actor, action="second_factor_removed", kind="person", subject=person_id, org=None
                )
        return confirmed

    async def needed(self, tenant: str) -> bool:
        """Return whether an organisation lets nobody in without one."""
        query = sa.select(organisation.c.needs_second_factor).where(organisation.c.id == tenant)
        async with self._engine.begin() as db:
            return bool((await db.execute(query)).scalar_one_or_none())

    async def need(self, tenant: str, *, on: bool, actor: str) -> None:
        """Set whether an organisation asks its members for one."""
        async with self._engine.begin() as db:
            mine = sa.update(organisation).where(organisation.c.id == tenant)
            await db.execute(mine.values(needs_second_factor=on))
            action = "second_factor_required" if on else "second_factor_optional"
            await record(db, actor=actor, action=action, kind="org", subject=tenant, org=tenant)

    async def _takes(self, db: AsyncConnection, person_id: str, code: str, *, confirmed: bool) -> bool:
        """Use a code of the app up. Two that come at once with the same code: one of them is refused."""
        given = "".join(code.split())
        if not (len(given) == 6 and given.isascii() and given.isdigit()):
            return False
        state = second_factor.c.confirmed_at.is_not(None) if confirmed else second_factor.c.confirmed_at.is_(None)
        mine = sa.and_(second_factor.c.person_id == person_id, state)
        secret = (await db.execute(sa.select(second_factor.c.secret).where(mine))).scalar_one_or_none()
        if secret is None:
            return False
        now, codes = int(self._now_s()) // PERIOD_S, pyotp.TOTP(secret)
        step = next((now + i for i in _AROUND if hmac.compare_digest(codes.generate_otp(now + i), given)), None)
        if step is None:
            return False
        newer = sa.and_(mine, second_factor.c.last_step < step)
        return bool((await db.execute(sa.update(second_factor).where(newer).values(last_step=step))).rowcount)


def enrolment_of(secret: str, account: str) -> Enrolment:
    """Return what an app is shown for a secret."""
    return Enrolment(secret=secret, address=pyotp.TOTP(secret).provisioning_uri(name=account, issuer_name="pdgate"))


async def _new_codes(db: AsyncConnection, person_id: str) -> Sequence[str]:
    codes = [_recovery_code() for _ in range(RECOVERY_CODES)]
    await db.execute(sa.delete(recovery_code).where(recovery_code.c.person_id == person_id))
    rows = [{"person_id": person_id, "code_hash": _hash(person_id, code)} for code in codes]
    await db.execute(sa.insert(recovery_code), rows)
    return codes


def _recovery_code() -> str:
    text = base64.b32encode(secrets.token_bytes(_RECOVERY_BYTES)).decode().lower()
    return "-".join(text[i : i + 4] for i in range(0, len(text), 4))


def _hash(person_id: str, code: str) -> bytes:
    """Return what is stored of a recovery code. It has 80 random bits: a slow hash would add nothing."""
    plain = "".join(letter for letter in code.lower() if letter.isalnum())
    return hashlib.sha256(f"{person_id}\n{plain}".encode()).digest()
