"""An invoice as people get it: PDF and CSV. Same lines, same sums."""

import csv
import io
from pathlib import Path
from typing import Final

from fpdf import FPDF
from fpdf.enums import XPos, YPos

from billing.currencies import cents_text
from billing.invoice_book import Invoice

_NANO_PER_UNIT: Final = 1_000_000_000
_WIDTHS: Final = (88, 26, 26, 24, 26)  # mm: description, quantity, price, version, amount
_LINE_MM: Final = 5.0
_COLUMNS: Final = (
    "position",
    "kind",
    "description",
    "project",
    "model",
    "tier",
    "meter",
    "scope",
    "batch",
    "price_version",
    "price_per_million",
    "tokens",
    "requests",
    "amount_exact",
    "amount",
    "currency",
)


def invoice_csv(found: Invoice) -> str:
    """Return one row per line, then tax, total, credits and due."""
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow(_COLUMNS)
    for position, line in enumerate(found.lines, 1):
        rows.writerow(
            [
                position,
                line.kind,
                _safe(line.description),
                _safe(line.project or ""),
                line.model,
                line.tier,
                line.meter,
                line.scope,
                line.batch,
                line.price_version,
                "" if line.price is None else _units(line.price),
                line.tokens,
                line.requests,
                _units(line.amount),
                cents_text(line.amount_cents, found.currency),
                found.currency,
            ]
        )
    for kind, cents in _sums(found):
        rows.writerow(["", kind, *[""] * 12, cents_text(cents, found.currency), found.currency])
    return out.getvalue()


class _Page:
    """Text on A4, top to bottom."""

    def __init__(self, font: Path | None) -> None:
        self.pdf = FPDF(format="A4")
        self.pdf.set_auto_page_break(auto=True, margin=18)
        self._latin_only = font is None
        self._family = "Helvetica" if font is None else "named"
        for style in ("", "B") if font is not None else ():
            self.pdf.add_font(self._family, style, str(font))
        self.pdf.add_page()

    def row(self, cells: tuple[str, ...], style: str = "") -> None:
        """Print one row of the table."""
        self.pdf.set_font(self._family, style, 9)
        for number, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True)):
            last = number == len(cells) - 1
            self.pdf.cell(
                width,
                _LINE_MM,
                self._text(_cut(cell, width)),
                align="L" if number == 0 else "R",
                new_x=XPos.LMARGIN if last else XPos.RIGHT,
                new_y=YPos.NEXT if last else YPos.TOP,
            )

    def paragraph(self, raw: str, style: str = "", size: int = 9) -> None:
        """Print text over the whole width."""
        self.pdf.set_font(self._family, style, size)
        self.pdf.multi_cell(0, _LINE_MM, self._text(raw), new_x=XPos.LMARGIN, new_y=YPos.NEXT)

    def _text(self, raw: str) -> str:
        return raw.encode("latin-1", "replace").decode("latin-1") if self._latin_only else raw


def invoice_pdf(found: Invoice, *, font: Path | None = None) -> bytes:
    """Return the invoice as PDF, A4. Without a font file, characters beyond Latin-1 are printed as `?`."""
    page = _Page(font)
    page.pdf.set_creation_date(found.issued_at or found.period_end)  # the same invoice is the same file
    title = "Credit note" if found.kind == "credit_note" else "Invoice"
    page.paragraph(f"{title} {found.number or '(draft)'}", "B", 16)
    page.pdf.ln(2)
    page.paragraph(_dates(found))
    for role, party in (("From", found.seller), ("To", found.buyer)):
        page.pdf.ln(3)
        page.paragraph(role, "B")
        tax_id = f"Tax number {party['tax_id']}" if party["tax_id"] else ""
        words = (party["legal_name"] or found.organisation * (role == "To"), party["address"], party["country"], tax_id)
        page.paragraph("\n".join(word for word in (*words, party["email"]) if word) or "-")
    page.pdf.ln(5)
    page.row(("Description", "Tokens", f"{found.currency} per million", "Version", found.currency), "B")
    for line in found.lines:
        page.row(
            (
                f"{line.project or ''} {line.description}".strip(),
                "" if line.tokens is None else f"{line.tokens:,}",
                "" if line.price is None else _units(line.price),
                "" if line.price_version is None else str(line.price_version),
                cents_text(line.amount_cents, found.currency),
            )
        )
    page.pdf.ln(3)
    tax_name = f"{found.buyer.get('tax_name') or 'Tax'} {found.buyer.get('tax_ppm', 0) / 10_000:g} %"
    for kind, cents in _sums(found):
        name = tax_name if kind == "tax" else kind.capitalize()
        page.row((name, "", "", "", cents_text(cents, found.currency)), "B" if kind in ("total", "due") else "")
    return bytes(page.pdf.output())


def _dates(found: Invoice) -> str:
    dates = f"Period {found.period_start:%Y-%m-%d} to {found.period_end:%Y-%m-%d} (UTC, end exclusive)"
    if found.issued_at is not None:
        dates += f"\nIssued {found.issued_at:%Y-%m-%d}"
    if found.due_at is not None and found.due_cents:
        dates += f", due {found.due_at:%Y-%m-%d}"
    return dates


def _sums(found: Invoice) -> tuple[tuple[str, int], ...]:
    return (
        ("subtotal", found.subtotal_cents),
        ("tax", found.tax_cents),
        ("total", found.total_cents),
        ("credits", -found.credits_cents),
        ("due", found.due_cents),
    )


def _units(nano: int) -> str:
    whole, rest = divmod(abs(nano), _NANO_PER_UNIT)
    decimals = f"{rest:09d}".rstrip("0")
    return f"{'-' if nano < 0 else ''}{whole}{f'.{decimals}' if decimals else ''}"


def _cut(cell: str, width_mm: int) -> str:
    most = int(width_mm / 1.75)
    return cell if len(cell) <= most else cell[: most - 1] + "…"


def _safe(cell: str) -> str:
    """Return text that a spreadsheet does not take for a formula."""
    return f"'{cell}" if cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell
