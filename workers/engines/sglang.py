"""SGLang in this process: this module and `sglang_parsers` alone import it.

1. The constructor runs before any event loop: it looks for an accelerator, prepares environment and
   path, imports SGLang and builds the engine, whose scheduler and detokenizer are child processes.
2. `start` binds SGLang's reader to the running loop and replaces its signal handlers: when a child dies
   this process exits at once with `EXIT_ENGINE_DIED`, and SIGTERM stays with the caller.
3. `submit` starts one task per request, which reads SGLang's stream and writes the outlet.
4. When `run` is cancelled it ends what is open and kills the children.
"""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import structlog

from contracts.identity import new_room
from contracts.lifecycle import FinishReason, HandOff, Phase, Role
from contracts.wire import Counts, Stages, unpack_ids
from workers.engine import End, EngineFacts, EngineLoad, Job, Outlet, Refusal, SwitchFailed, SwitchRefused
from workers.engines.bootstrap_door import BootstrapDoor, free_port
from workers.engines.continued_text import ContinuedText
from workers.engines.kv_bytes import kv_bytes_per_token
from workers.engines.pieces import Pieces
from workers.engines.prefill_watch import PrefillWatch
from workers.engines.sglang_answer import ONE_TOKEN, Answer, sampling_params
from workers.engines.sglang_experts import FOLDER_VARIABLE, ExpertFeed, records
from workers.engines.sglang_features import bad, check_features, feature_params, logprob_arguments
from workers.engines.sglang_kv import KvFeed, page_fits
from workers.engines.sglang_options import SglangOptions, arguments, environment, slowest_step_ms
from workers.engines.sglang_scratch import make_scratch
from workers.expert_table import ExpertTable
from workers.kv_table import KvTable
from workers.pins import Pins

if TYPE_CHECKING:
    from workers.engines.sglang_parsers import Anatomy

log = structlog.get_logger()

EXIT_ENGINE_DIED = 70
POLL_S = 0.1
SWITCH_S = 120.0  # a rebuild takes under a second; capturing graphs, tens of seconds
NOT_IDLE = "not idle"  # of SGLang's answer to a role change; it has no code for it


class SglangEngine:
    """One SGLang engine; see workers.engine.Engine for the calls."""

    def __init__(self, options: SglangOptions, kv: KvTable, experts: ExpertTable) -> None:
        # Here and not at the top: the environment comes first, and child processes import this module.
        import torch  # noqa: PLC0415

        self._accelerator = bool(torch.accelerator.is_available())
        variables = environment(options, accelerator=self._accelerator, inherited=os.environ)
        self._scratch = make_scratch()
        expert_files = Path(self._scratch) / "experts"
        os.environ.update(variables, TMPDIR=self._scratch, **{FOLDER_VARIABLE: str(expert_files)})
        tempfile.tempdir = None  # read TMPDIR again
        sys.path[:0] = [path for path in variables.get("PYTHONPATH", "").split(":") if path not in sys.path]

        import sglang  # noqa: PLC0415
        from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST  # noqa: PLC0415
        from sglang.srt.managers.io_struct import (  # noqa: PLC0415
            GenerateReqInput,
            PdRoleSwitchReqInput,
            ReleaseMemoryOccupationReqInput,
            ResumeMemoryOccupationReqInput,
        )

        from workers.engines import sglang_parsers  # noqa: PLC0415

        sglang_parsers.check_names(options)
        self._options = options
        self._feed = KvFeed(kv, Path(self._scratch))
        self._experts = ExpertFeed(expert_files, experts.add, load=partial(torch.load, weights_only=True))
        self._hand_off = HandOff.STORE if options.store is not None else HandOff.DIRECT
        has_peers = options.role is not Role.UNIFIED and options.store is None
        self._port = free_port() if has_peers else 0
        self._engine = sglang.Engine(
            **arguments(
                options, accelerator=self._accelerator, bootstrap_port=self._port, kv_events=self._feed.address
            ),
            custom_sigquit_handler=_exit_engine_died,
        )
        self._tm = self._engine.tokenizer_manager
        behind = (str(self._engine.server_args.host), self._port)
        self._door = BootstrapDoor(options.bootstrap_host, options.bootstrap_port, server=behind)
        self._request_type = GenerateReqInput
        self._parsers = sglang_parsers
        self._token_bytes = sglang_parsers.token_bytes_of(self._tm.tokenizer)
        self._switch_type = PdRoleSwitchReqInput
        self._release_type, self._resume_type = ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
        self._no_peer = FAKE_BOOTSTRAP_HOST
        self._facts = self._read_facts()
        self._pins = Pins(self._facts.kv_capacity_tokens)
        self._chunk_tokens = int(self._engine.server_args.chunked_prefill_size or 0)
        self._vocabulary = int(self._tm.model_config.vocab_size)
        self._end_tokens = {*(self._tm.model_config.hf_eos_token_id or ()), self._tm.tokenizer.eos_token_id}
        self._jobs: dict[str, Job] = {}
        self._prompts = PrefillWatch()
        self._aborting: set[str] = set()
        self._tasks: asyncio.TaskGroup | None = None
        self._snapshot: Any = None
        self._prefill_tokens = 0
        self._chunks_seen = 0
        self._transfers: deque[float] = deque(maxlen=64)

    # -- Engine ----------------------------------------------------------------------------------------

    async def start(self, role: Role) -> EngineFacts:
        """Bind the engine to the running loop and return the facts."""
        if role is not self._options.role:  # before anything else is asked of it
            raise ValueError(f"the engine was built for the role {self._options.role}, not {role}")
        self._tm.auto_create_handle_loop()
        await self._open_door()
        self._facts = self._read_facts()
        if records(self._engine.server_args):
            await self._experts.begin(self._tm)
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGTERM)
        loop.add_signal_handler(signal.SIGQUIT, _exit_engine_died, signal.SIGQUIT, None)
        return self._facts

    async def run(self) -> None:
        """Serve until cancelled, then end what is open and kill the engine's processes."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                if self._facts.tells_blocks:
                    tasks.create_task(self._feed.run())
                if records(self._engine.server_args):
                    tasks.create_task(self._experts.run(self._tm))
                while True:
                    self._read_load()
                    await asyncio.sleep(POLL_S)
        finally:
            self._tasks = None
            self._door.close()
            self._engine.shutdown()
            self._remove_files()

    def submit(self, job: Job, outlet: Outlet) -> None:
        """Check what SGLang would fail on late or die of, then start the request."""
        if self._tasks is None:
            raise Refusal("unhealthy", "the engine does not run")
        ids = unpack_ids(job.input)
        self._check(job, ids)
        anatomy = self._parsers.anatomy(job, self._tm.tokenizer)
        self._jobs[job.engine_id] = job
        if job.phase is Phase.PREFILL and job.hand_off is HandOff.DIRECT:
            self._prompts.opened(job, outlet, time.time())
        self._tasks.create_task(self._serve(job, ids, outlet, anatomy))

    def abort(self, job: Job) -> None:
        """Ask SGLang to abort; the caller repeats it, since one in the instant of submission is lost."""
        if job.engine_id not in self._jobs:
            return
        self._aborting.add(job.engine_id)
        state = self._tm.rid_to_state.get(job.engine_id)
        if state is not None:
            state.abort_sent = False  # SGLang sends only the first abort of a request
            self._tm.abort_request(job.engine_id)

    async def switch(self, role: Role) -> EngineFacts:
        """Let SGLang rebuild what belongs to its role; the KV pool stays, the prefix cache does not."""
        if role not in self._facts.switch_roles:
            raise SwitchRefused(f"SGLang cannot change from {self._facts.role} to {role}")
        # Graphs for decode are captured on a change only where there is an accelerator to capture them on.
        asked = self._switch_type(new_role=role.value, decode_cuda_graph_memory_gb=0.0)
        try:
            async with asyncio.timeout(SWITCH_S):
                result = await self._tm.pd_role_switch(asked)
        except TimeoutError:
            raise SwitchFailed(f"SGLang gave no answer in {SWITCH_S:g} s") from None
        if result.success:
            await self._open_door()
            self._facts = self._read_facts()
            self._feed.clear()
            self._pins.clear()
            self._chunks_seen += 1  # the engine has moved, though nothing was computed
            return self._facts
        if result.safe_to_restore:
            raise SwitchRefused(result.message, busy=NOT_IDLE in result.message)
        raise SwitchFailed(result.message)

    async def sleep(self) -> None:
        """Let SGLang keep its weights in host memory, and give up KV pool and graphs.

        Without an accelerator, and so without torch-memory-saver, it only empties its cache.
        """
        await self._tm.release_memory_occupation(self._release_type())
        self._feed.clear()
        self._pins.clear()

    async def wake(self) -> None:
        """Let SGLang take its memory back."""
        await self._tm.resume_memory_occupation(self._resume_type())
        self._chunks_seen += 1  # the engine has moved, though nothing was computed

    def load(self) -> EngineLoad:
        """Return the scheduler's last published load, and the open requests of this process."""
        snapshot = self._snapshot
        if snapshot is None:
            return EngineLoad(num_running=len(self._jobs))
        disaggregation = snapshot.disaggregation
        transferring = for_peer = 0
        if disaggregation is not None:
            transferring = disaggregation.prefill_inflight_queue_reqs + disaggregation.decode_transfer_queue_reqs
            for_peer = disaggregation.prefill_bootstrap_queue_reqs + disaggregation.decode_prealloc_queue_reqs
        transfers = sorted(self._transfers)
        return EngineLoad(
            num_running=max(len(self._jobs) - snapshot.num_waiting_reqs, snapshot.num_running_reqs),
            num_waiting=snapshot.num_waiting_reqs,
            num_computing=max(0, len(self._jobs) - transferring - for_peer),
            prefill_queue_tokens=snapshot.num_waiting_uncached_tokens,
            kv_used_tokens=snapshot.num_used_tokens,
            prefill_chunks_done=self._chunks_seen,
            num_transfers=transferring,
            transfer_p50_ms=transfers[len(transfers) // 2] if transfers else 0.0,
            num_waiting_decode_memory=snapshot.queues.prealloc_ready if snapshot.queues else 0,
            num_prefill_waiting=snapshot.num_waiting_reqs if self._facts.role is not Role.DECODE else 0,
            num_prefill_bootstrap=disaggregation.prefill_bootstrap_queue_reqs if disaggregation else 0,
            num_prefill_inflight=disaggregation.prefill_inflight_queue_reqs if disaggregation else 0,
            num_decode_transfer=disaggregation.decode_transfer_queue_reqs if disaggregation else 0,
        )

    # -- requests --------------------------------------------------------------------------------------

    def _check(self, job: Job, ids: list[int]) -> None:
        total = job.num_prompt_tokens + job.sampling.max_tokens
        limit = min(self._facts.context_tokens, self._facts.kv_capacity_tokens)
        if total > limit:
            raise Refusal("bad_request", f"prompt and max_tokens are {total} tokens; this worker takes {limit}")
        if max(ids) >= self._vocabulary:
            raise Refusal("bad_request", f"token id {max(ids)} is outside the vocabulary of {self._vocabulary}")
        if job.phase is not Phase.UNIFIED and not job.peerless and job.hand_off is not self._hand_off:
            raise Refusal("bad_request", f"this worker has no hand-off {job.hand_off}")
        if job.sampling.min_p and not self._accelerator:
            # With seeds, which the CPU profile always gives, SGLang's scheduler dies of min_p.
            raise bad("min_p", "it is not available without an accelerator")
        check_features(job, vocabulary=self._vocabulary, parsers=self._parsers.PARSERS, adapters=self._options.adapters)

    async def _serve(self, job: Job, ids: list[int], outlet: Outlet, anatomy: "Anatomy") -> None:
        answer = Answer(job, chunk_tokens=self._chunk_tokens)
        pieces = self._pieces(job, ids, anatomy)
        error = ""
        try:
            if (over := self._already_over(job, ids)) is not None:
                self._end_at_once(job, pieces, outlet, over)
                return
            pieces.replay(outlet)
            async for out in self._tm.generate_request(self._request(job, ids, anatomy)):
                text, new = answer.take(out)
                tells = job.phase is not Phase.PREFILL and (new or text)
                if tells and not pieces.put(outlet, text, new, out["meta_info"]):
                    self.abort(job)
            pieces.finish(outlet)
        except asyncio.CancelledError:
            self._aborting.add(job.engine_id)
            raise
        except Exception as failure:  # noqa: BLE001 - the edge to the engine: whatever it raises ends one request
            error = f"{type(failure).__name__}: {failure}"
            log.warning("engine_request_failed", error=error)
        finally:
            if job.engine_id in self._jobs:
                self._end(job, answer, outlet, error, pieces)

    def _request(self, job: Job, ids: list[int], anatomy: "Anatomy") -> Any:
        if job.phase is Phase.PREFILL and job.hand_off is HandOff.STORE:
            return self._request_type(
                rid=job.engine_id,
                input_ids=ids,
                sampling_params=dict(ONE_TOKEN),
                lora_path=job.adapter or None,
                stream=True,
                log_metrics=False,
                cache_salt=job.cache_salt or None,
                priority=self._pins.value_of(job),
            )
        return self._request_type(
            rid=job.engine_id,
            input_ids=ids,
            sampling_params={
                **sampling_params(job.sampling, num_delivered=job.num_delivered),
                **feature_params(job.sampling, sample=job.attempt.sample),
                **anatomy.params,
            },
            require_reasoning=anatomy.after_reasoning,
            lora_path=job.adapter or None,
            stream=True,
            log_metrics=False,
            cache_salt=job.cache_salt or None,
            priority=self._pins.value_of(job),
            **logprob_arguments(job.sampling),
            **self._pairing(job),
        )

    # -- continuations ---------------------------------------------------------------------------------

    def _pieces(self, job: Job, ids: list[int], anatomy: "Anatomy") -> Pieces:
        continued: ContinuedText | None = None
        if job.delivered and job.phase is not Phase.PREFILL:
            skip = bool(anatomy.params.get("skip_special_tokens", True))
            decode = partial(self._tm.tokenizer.decode, skip_special_tokens=skip)
            continued = ContinuedText(job, ids[: job.num_prompt_tokens], ids[job.num_prompt_tokens :], decode)
        return Pieces(job, anatomy.parser, self._token_bytes.of, continued)

    def _already_over(self, job: Job, ids: list[int]) -> FinishReason | None:
        """Return how an answer ended of which only the end was lost; None when there is more of it to make."""
        if not job.delivered:
            return None
        ends = set() if job.sampling.ignore_eos else self._end_tokens
        if ids[-1] in ends or ids[-1] in job.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if job.num_delivered >= job.sampling.max_tokens else None

    def _end_at_once(self, job: Job, pieces: Pieces, outlet: Outlet, reason: FinishReason) -> None:
        counts = Counts()
        if job.phase is not Phase.PREFILL:
            pieces.replay(outlet)
            pieces.finish_early(outlet, complete=reason is FinishReason.STOP)
            # Nothing is computed; the figures say which answer this is the end of.
            counts = Counts(prompt_tokens=job.num_input_tokens, cached_tokens=job.num_input_tokens)
        del self._jobs[job.engine_id]
        self._aborting.discard(job.engine_id)
        reason = FinishReason.STOP if job.phase is Phase.PREFILL else reason
        outlet.end(End(reason=reason, counts=counts, stages=Stages()))

    def _pairing(self, job: Job) -> dict[str, Any]:
        if job.phase is Phase.UNIFIED or self._hand_off is HandOff.STORE:
            return {}
        if job.peerless:
            return {"bootstrap_host": self._no_peer, "bootstrap_port": self._port, "bootstrap_room": new_room()}
        return {
            "bootstrap_host": job.bootstrap_host,
            "bootstrap_port": job.bootstrap_port,
            "bootstrap_room": job.bootstrap_room,
        }

    def _end(self, job: Job, answer: Answer, outlet: Outlet, error: str, pieces: Pieces) -> None:
        end = answer.end(abort_asked=job.engine_id in self._aborting, error=error, stopped_by=pieces.stopped_by)
        if pieces.reasoning_tokens:
            end = msgspec.structs.replace(
                end, counts=msgspec.structs.replace(end.counts, reasoning_tokens=pieces.reasoning_tokens)
            )
        del self._jobs[job.engine_id]
        self._prompts.ended(job)
        self._aborting.discard(job.engine_id)
        if end.reason is FinishReason.STOP and end.stages.transfer_ms:
            self._transfers.append(end.stages.transfer_ms)
        outlet.end(end)

    # -- the engine's own figures ----------------------------------------------------------------------

    def _read_facts(self) -> EngineFacts:
        info = self._engine._scheduler_init_result.scheduler_infos[0]  # noqa: SLF001 - SGLang shows it nowhere else
        arguments_in_force = self._engine.server_args
        mode = str(self._tm.disaggregation_mode.value)
        role = Role.UNIFIED if mode == "null" else Role(mode)
        is_prefill = role is Role.PREFILL
        return EngineFacts(
            name="sglang",
            role=role,
            simulated=False,
            dtype=str(arguments_in_force.dtype),
            kv_dtype=str(arguments_in_force.kv_cache_dtype),
            page_size=int(arguments_in_force.page_size or 1),
            tp_size=int(arguments_in_force.tp_size),
            dp_size=int(arguments_in_force.dp_size),
            transfer_backend=(
                f"store:{self._options.store.kind}"
                if self._options.store is not None
                else str(arguments_in_force.disaggregation_transfer_backend)
            ),
            bootstrap_host=self._options.bootstrap_host if is_prefill else "",
            bootstrap_port=self._door.port if is_prefill else 0,
            kv_capacity_tokens=int(info["max_total_num_tokens"]),
            kv_bytes_per_token=kv_bytes_per_token(
                self._tm.model_config, kv_dtype=str(arguments_in_force.kv_cache_dtype)
            ),
            max_running=int(arguments_in_force.max_running_requests or 256),
            context_tokens=int(self._tm.context_len),
            hand_offs=(self._hand_off,),
            sleeps=self._options.sleeps,
            role_is_label=self._hand_off is HandOff.STORE,
            slowest_step_ms=slowest_step_ms(accelerator=self._accelerator),
            tells_blocks=page_fits(int(arguments_in_force.page_size or 1)),
            switch_roles=(
                frozenset({Role.PREFILL, Role.DECODE}) - {role}
                if arguments_in_force.enable_pd_role_switch
                else frozenset()
            ),
        )

    async def _open_door(self) -> None:
        if self._port and self._tm.disaggregation_mode.value == Role.PREFILL:
            await self._door.open()
        else:
            self._door.close()

    def _remove_files(self) -> None:
        from sglang.srt.managers.load_snapshot import shm_path_for  # noqa: PLC0415 - as above

        Path(shm_path_for(self._engine.port_args.instance_id)).unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _read_load(self) -> None:
        snapshots = self._tm.load_snapshot_reader.read_all()
        if not snapshots:
            return
        self._snapshot = snapshots[0]
        if (queues := self._snapshot.disaggregation) is not None and self._facts.role is Role.PREFILL:
            self._prompts.look(
                at_unix_s=self._snapshot.timestamp,
                waiting_for_peer=queues.prefill_bootstrap_queue_reqs,
                in_transfer=queues.prefill_inflight_queue_reqs,
            )
        computed = self._snapshot.total_prefill_uncached_tokens
        if computed != self._prefill_tokens:
            self._prefill_tokens = computed
            self._chunks_seen += 1


def _exit_engine_died(signum: int, frame: FrameType | None) -> None:
    """Leave at once when a child of the engine has died: nothing can be served, and peers see the reset."""
    del signum, frame
    sys.stderr.write(f"worker {os.environ.get('WORKER_ID', '')}: a process of the engine died, see its lines above\n")
    sys.stderr.flush()
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(EXIT_ENGINE_DIED)
