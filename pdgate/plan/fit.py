"""Fits of the roofline's factors to measurements, and their errors on groups that the fit never saw.

* TTFT: the rows of the lowest concurrency of each configuration (at most four requests at once: above that the figure
  is queueing); the front latency is one constant per engine.
* KV transfer: `t0 + bytes / (share * line rate)`.

Both are robust (mean absolute relative error) and one model over all engines; a group's rows weigh together as the
square root of its size. `calibrate` moves fitted factors towards a few measurements of the user's own system.
"""

import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from contracts.roofline import Efficiency, Terms
from pdgate.plan.least_squares import predict, robust_fit, solve_bounded
from pdgate.plan.measured import Measured, Transfer
from pdgate.plan.workload import WorkloadError, mean, percentile

FITTED = Path(__file__).with_name("fitted.toml")
LOW_CONCURRENCY = 4
CLAIM_ROWS = 30  # a smaller group is reported, not claimed
CALIBRATION_RANGE = 0.5  # factors move at most this share of their prior (DESIGN: bounded to +-50 %)
CALIBRATION_PULL = 0.05
ENGINES = ("sglang", "trtllm", "vllm")


class GroupError(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one held-out group; shares, 0.1 = 10 %."""

    group: str
    rows: int
    mape: float
    median: float  # absolute
    bias: float  # median signed: above 0 = predicted too slow
    mape_without_bias: float  # mean absolute deviation from the group's median ratio: what a right bias would leave

    @property
    def claimed(self) -> bool:
        """Whether the group is large enough to claim its figure."""
        return self.rows >= CLAIM_ROWS


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """Errors on rows predicted by a fit that never saw their group."""

    groups: list[GroupError]
    rows: int
    mape: float
    median: float


class Coefficients(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted factors in the order of `prefill_features` and `decode_features`."""

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    work: tuple[float, float] = (1.0, 1.0)  # of dense models and of mixtures, see `fit_work`

    def ttft_ms(self, row: Measured) -> float:
        """Return the predicted TTFT of an unloaded run, ms."""
        return predict(self.prefill, prefill_features(row))

    def tpot_ms(self, row: Measured) -> float:
        """Return the predicted TPOT of a run, ms."""
        return predict(self.decode, decode_features(row, self.prefill))


def fit(rows: Sequence[Measured]) -> Coefficients:
    """Return the factors that fit the rows best."""
    prefill = fit_prefill(unloaded(rows))
    decode = robust_fit([decode_features(r, prefill) for r in rows], [r.tpot_ms for r in rows], group_weights(rows))
    return Coefficients(prefill=tuple(prefill), decode=tuple(decode), work=fit_work(rows, prefill))


def fit_prefill(rows: Sequence[Measured]) -> list[float]:
    """Return the TTFT coefficients in the order of `prefill_features`."""
    return robust_fit([prefill_features(r) for r in rows], [r.ttft_ms for r in rows], group_weights(rows))


def fit_work(rows: Sequence[Measured], prefill: Sequence[float]) -> tuple[float, float]:
    """Return the time that a prompt's tokens take of a busy worker over that of an unloaded prompt, weights aside.

    Of dense models and of mixtures. Read off decode steps with prompts in them: while an answer of `O` gaps is
    decoded, `(C - 1) * O*t / (TTFT + O*t)` other prompts of a closed loop with `C` requests come by. (TTFT is an input
    here, so these factors are for planning; `decode_features` predicts a run of which only the settings are known.)
    """

    def features(row: Measured) -> list[float]:
        *own, mixed = decode_features(row, prefill)
        decoding_ms = (row.output_tokens - 1) * row.tpot_ms
        mixed *= decoding_ms / (row.ttft_ms + decoding_ms)
        return [*own, 0.0, mixed] if row.shape.experts else [*own, mixed, 0.0]

    *_, dense, mixture = robust_fit([features(r) for r in rows], [r.tpot_ms for r in rows], group_weights(rows))
    return dense, mixture


def fit_transfer(rows: Sequence[Transfer]) -> list[float]:
    """Return the fixed time in ms and one over the share of the line rate."""
    return robust_fit([_transfer_features(r) for r in rows], [r.transfer_ms for r in rows], [1.0] * len(rows))


def efficiency(found: Coefficients, transfer: Sequence[float]) -> Efficiency:
    """Return fitted coefficients by name."""
    weights, experts, kv, compute, attention, links, layer, moe_layer, request, mixed = found.decode
    dense, moe, pairs, read, reduce, *fronts = found.prefill
    return Efficiency(
        weights=weights,
        experts=experts,
        kv=kv,
        compute=compute,
        attention=attention,
        links=links,
        layer_ms=layer,
        moe_layer_ms=moe_layer,
        request_ms=request,
        mixed_prefill=mixed,
        work_dense=found.work[0],
        work_moe=found.work[1],
        prefill_dense=dense,
        prefill_moe=moe,
        prefill_attention=pairs,
        prefill_weights=read,
        prefill_links=reduce,
        front_ms=dict(zip(ENGINES, fronts, strict=True)),
        transfer_fixed_ms=transfer[0],
        transfer_share=1 / transfer[1],
    )


def fitted(file: Path = FITTED) -> Efficiency:
    """Return the factors that ship with the planner, or those of the user's own fit.

    Raises:
        WorkloadError: unreadable, or not a file of factors.
    """
    try:
        return msgspec.convert(tomllib.loads(file.read_text()), Efficiency)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise WorkloadError(f"{file}: {error}") from None


def decode_features(row: Measured, prefill: Sequence[float]) -> list[float]:
    """Terms of a run's TPOT: those of its decode step, and the prefill of the other requests mixed into it.

    In a closed loop each of the others brings one prompt per answer. Reading the weights is part of the step already.
    """
    dense, moe, pairs, _, reduce, *_ = prefill
    terms = row.prefill
    prompt_ms = (
        dense * terms.compute_ms + moe * terms.moe_compute_ms + pairs * terms.attention_ms + reduce * terms.links_ms
    )
    return [*decode_columns(row.decode), (row.concurrency - 1) * prompt_ms / row.output_tokens]


def prefill_features(row: Measured) -> list[float]:
    """Terms of an unloaded run's TTFT: those of one prompt, and which engine's front it passed."""
    terms = row.prefill
    return [
        terms.compute_ms,
        terms.moe_compute_ms,
        terms.attention_ms,
        terms.weights_ms,
        terms.links_ms,
        *(float(row.engine == engine) for engine in ENGINES),
    ]


def unloaded(rows: Sequence[Measured]) -> list[Measured]:
    """Return the rows of the lowest concurrency of each configuration and prompt length."""

    def setting(row: Measured) -> tuple[object, ...]:
        return row.group, row.engine, row.version, row.use.weights, row.use.gpus, row.prompt_tokens

    lowest: dict[tuple[object, ...], int] = {}
    for row in rows:
        lowest[setting(row)] = min(row.concurrency, lowest.get(setting(row), row.concurrency))
    return [r for r in rows if r.concurrency == lowest[setting(r)] and r.concurrency <= LOW_CONCURRENCY]


class Reports(msgspec.Struct, frozen=True, kw_only=True):
    """Errors on groups that the fit never saw."""

    ttft: HeldOut  # of unloaded rows
    tpot: HeldOut
    tpot_calibrated: HeldOut  # after a few of the group's own rows, which are not scored


def held_out(rows: Sequence[Measured], *, points: int = 3) -> Reports:
    """Return the errors of each group under a fit without it.

    Calibrated is what a user gets who measures `points` concurrencies of one setting (model, GPU, engine version,
    format, GPUs): the lowest, the highest and those between.
    """
    first: dict[str, list[float]] = {}
    step: dict[str, list[float]] = {}
    own: dict[str, list[float]] = {}
    for group in sorted({r.group for r in rows}):
        members = [r for r in rows if r.group == group]
        found = fit([r for r in rows if r.group != group])
        step[group] = [found.tpot_ms(r) / r.tpot_ms - 1 for r in members]
        first[group] = [found.ttft_ms(r) / r.ttft_ms - 1 for r in unloaded(members)]
        own[group] = _calibrated_errors(found, members, points)
    return Reports(ttft=_summary(first), tpot=_summary(step), tpot_calibrated=_summary(own))


def _calibrated_errors(prior: Coefficients, members: Sequence[Measured], points: int) -> list[float]:
    errors: list[float] = []
    settings: dict[tuple[object, ...], list[Measured]] = {}
    for row in members:
        settings.setdefault((row.engine, row.version, row.use), []).append(row)
    for rows in settings.values():
        ordered = sorted(rows, key=lambda r: (r.concurrency, r.prompt_tokens, r.output_tokens))
        if len(ordered) < 2 * points:
            continue
        chosen = {round(i * (len(ordered) - 1) / (points - 1)) for i in range(points)}
        found = calibrate(prior, [ordered[i] for i in chosen])
        errors += [found.tpot_ms(r) / r.tpot_ms - 1 for i, r in enumerate(ordered) if i not in chosen]
    return errors


def held_out_transfer(rows: Sequence[Transfer]) -> HeldOut:
    """Return KV transfer errors, each size predicted by a fit on the other sizes (one measured system: no others)."""
    errors = []
    for index, row in enumerate(rows):
        found = fit_transfer([*rows[:index], *rows[index + 1 :]])
        errors.append(predict(found, _transfer_features(row)) / row.transfer_ms - 1)
    return _summary({rows[0].system: errors})


def calibrate(prior: Coefficients, rows: Sequence[Measured]) -> Coefficients:
    """Return decode coefficients moved towards a few measurements: one common scale, then each within +-50 %."""
    designs = [decode_features(r, prior.prefill) for r in rows]
    ratios = sorted(r.tpot_ms / predict(prior.decode, d) for r, d in zip(rows, designs, strict=True))
    scale = percentile(ratios, 0.5)
    centre = [scale * c for c in prior.decode]
    moved = solve_bounded(
        designs,
        [r.tpot_ms for r in rows],
        [1 / r.tpot_ms for r in rows],
        low=[c * (1 - CALIBRATION_RANGE) for c in centre],
        high=[c * (1 + CALIBRATION_RANGE) for c in centre],
        prior=centre,
        pull=CALIBRATION_PULL,
    )
    return msgspec.structs.replace(prior, decode=tuple(moved))


def decode_columns(terms: Terms) -> list[float]:
    """Return the terms of a decode step in the order of the coefficients; the mixed prefill comes after them."""
    return [
        terms.weights_ms,
        terms.experts_ms,
        terms.kv_ms,
        terms.compute_ms,
        terms.attention_ms,
        terms.links_ms,
        float(terms.layers),
        terms.moe_hops,
        terms.requests,
    ]


def _transfer_features(row: Transfer) -> list[float]:
    return [1.0, row.kv_bytes / row.line_bytes_per_s * 1000]


def group_weights(rows: Sequence[Measured]) -> list[float]:
    """Return each row's weight: a group's rows weigh together as the square root of its size."""
    sizes = Counter(r.group for r in rows)
    return [float(sizes[r.group] ** -0.25) for r in rows]  # squared in the fit: one over the root of the group's size


def _summary(errors: dict[str, list[float]]) -> HeldOut:
    groups = []
    for group, found in sorted(errors.items()):
        if not found:
            continue
        sizes = sorted(abs(e) for e in found)
        bias = percentile(sorted(found), 0.5)
        groups.append(
            GroupError(
                group=group,
                rows=len(found),
                mape=mean(sizes),
                median=percentile(sizes, 0.5),
                bias=bias,
                mape_without_bias=mean([abs((1 + e) / (1 + bias) - 1) for e in found]),
            )
        )
    pooled = sorted(abs(e) for found in errors.values() for e in found)
    return HeldOut(groups=groups, rows=len(pooled), mape=mean(pooled), median=percentile(pooled, 0.5))
