"""The handoff in front of people: a target goes on from the source's cache, or reads the prompt itself and says why.

Whatever goes wrong with a transfer, what the caller gets is the target's own prefill: exact, with the reason in the
record. Nothing that a request computes is kept, so requests may run side by side in threads.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.handoff.admission import Admission, Refusal, admit
from kvxfer.handoff.breaker import Breaker
from kvxfer.handoff.cost import handoff_share, new_tokens_share
from kvxfer.handoff.decoding import spoken
from kvxfer.handoff.policy import Policy
from kvxfer.handoff.record import APPLIED, FALLBACK, UNSUPPORTED, Accounts, HandoffRecord
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.evidence import read_evidence
from kvxfer.maps.plan import Plan
from kvxfer.maps.products import resolve_dtype
from kvxfer.models.hf.cache import build_cache, cache_keyword, read_cache
from kvxfer.models.hf.model import Running
from kvxfer.models.kv import KV
from kvxfer.models.machine import machine
from kvxfer.models.pair import Pair, load_pair
from kvxfer.models.spec import ModelSpec, PairSpec

Ids = Int[Tensor, "batch tokens"]
Clock = Callable[[], float]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Handed:
    """What the target goes on from.

    Attributes:
        cache: the library's own class, with the prompt's tokens but those that the target reads next.
        input_ids: the whole prompt ``[batch, tokens]``, as ``model.generate`` wants it.
        record: what became of the handoff.
    """

    cache: Any
    input_ids: Ids
    record: HandoffRecord
    keyword: str

    @property
    def inputs(self) -> dict[str, Any]:
        """Keywords for the target's ``generate``: the prompt, and the cache by the name that this library gives it."""
        return {"input_ids": self.input_ids, self.keyword: self.cache}


@dataclass(frozen=True)
class Answer:
    """What the target wrote, and how it came to the prompt's cache."""

    text: str
    ids: Int[Tensor, " new"]
    record: HandoffRecord


class Declined(Exception):
    """A transfer that is not, or no longer, wanted; ``failed`` ones count for the breaker."""

    def __init__(self, refusal: Refusal, failed: bool = False) -> None:
        super().__init__(refusal.why)
        self.refusal, self.failed = refusal, failed


@dataclass
class Watch:
    """Milliseconds by part, and a deadline that is looked at between chunks of tokens."""

    clock: Clock
    deadline_ms: float | None
    device: torch.device
    parts: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started = self.last = self.clock()

    def restart(self) -> None:
        """What has passed since the last part is of no part."""
        self.last = self.clock()

    def after(self, part: str) -> None:
        """A part has ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = self.clock()
        self.parts[part] = self.parts.get(part, 0.0) + 1000 * (now - self.last)
        self.last = now

    def look(self) -> None:
        """Give up when the deadline has passed."""
        spent = 1000 * (self.clock() - self.started)
        if self.deadline_ms is not None and spent > self.deadline_ms:
            why = f"{spent:.1f} ms have passed, and the deadline is {self.deadline_ms:g} ms"
            raise Declined(Refusal("deadline", why), failed=True)


class Handoff:
    """From a source to a target through one map, under a plan and a policy. Safe to share between threads.

    Args:
        pair: both models, loaded.
        cache_map: the map, or why there is none that can be used.
        plan: which tokens the target computes itself.
        admission: what the map was found to be allowed.
        policy: what a handoff may take.
        accounts: where records go.
        map_dtype: of the map's products (``kvxfer.maps.plan.MAP_DTYPES``).
    """

    def __init__(
        self,
        pair: Pair,
        cache_map: CacheMap | Refusal,
        plan: Plan,
        admission: Admission,
        policy: Policy,
        accounts: Accounts | None = None,
        map_dtype: str = "auto",
        clock: Clock = time.perf_counter,
    ) -> None:
        self.pair, self.plan, self.admission, self.policy = pair, plan, admission, policy
        self.breaker = Breaker(policy.failures, policy.retry_after)
        self.accounts = accounts or Accounts()
        self.accounts.check()
        self._clock = clock
        self._map = cache_map if isinstance(cache_map, CacheMap) else None
        self._transfer: Transfer | None = None
        if self._map is not None and admission.unsupported is None:
            device = pair.target.device
            dtype = resolve_dtype(map_dtype, device, pair.source.dtype)
            self._transfer = Transfer(pair, Mapper(self._map, device, dtype, pair), plan)
        self._keyword = cache_keyword(pair.target.lm.forward)

    @staticmethod
    def from_pretrained(
        map: str | Path,
        *,
        source: str | Path,
        target: str | Path,
        policy: Policy | str | Path | None = None,
        evidence: Sequence[str | Path] = (),
        plan: Plan | None = None,
        device: str = "auto",
        log: str | Path | None = None,
        metrics: Any = None,
    ) -> Handoff:
        """Load a map's folder and its two models, and look at what is known of the map.

        Args:
            map: the folder of a map (a run of ``train.py``).
            source, target: hub ids, folders of saved models, or the names of models that come with packages.
            policy: a policy, or a file with one; None for the strict one.
            evidence: further folders with evidence, beside the map's own.
            plan: which tokens are exact; None for four first ones and the last.
            log: a file to which a JSON line is added for each handoff.
            metrics: a ``prometheus_client`` registry.

        Raises:
            KvxferError: a model, policy or evidence can't be read. A map that can't be used is no error: the target
                then reads every prompt itself, and records say ``unsupported`` with the reason.
        """
        folder, chosen = Path(map).expanduser(), _policy(policy)
        wanted = found.manifest["pair"] if isinstance(found := _loaded(folder), CacheMap) else {}
        pair = load_pair(_spec(wanted, str(source), str(target), device))
        return Handoff.of(pair, folder, chosen, evidence, plan, log, metrics)

    @staticmethod
    def of(
        pair: Pair,
        folder: Path,
        policy: Policy,
        evidence: Sequence[str | Path] = (),
        plan: Plan | None = None,
        log: str | Path | None = None,
        metrics: Any = None,
    ) -> Handoff:
        """The same where both models are loaded already."""
        plan, found = plan or Plan(), _loaded(folder)
        if isinstance(found, Refusal):
            admission = Admission(unsupported=found)
        else:
            known = read_evidence(folder, found.hash, [Path(each).expanduser() for each in evidence])
            admission = admit(found, pair.describe(), plan, known, policy, machine(pair.target.device))
        accounts = Accounts(None if log is None else Path(log).expanduser(), metrics)
        return Handoff(pair, found, plan, admission, policy, accounts)

    @torch.inference_mode()
    def transfer(self, source_cache: Any, input_ids: Ids, request: str | None = None) -> Handed:
        """Turn the source's cache of a prompt into the target's, or let the target read the prompt.

        Args:
            source_cache: the source's ``DynamicCache`` (or ``KV``), rotated, of the prompt's first tokens: all of them,
                or all but the last few, which the target then reads itself. Rows are not padded.
            input_ids: the whole prompt.
            request: its id; a new one if there is none.
        """
        return self._hand(lambda: (_as_kv(source_cache, self.pair), None), input_ids, request)

    def generate(self, prompt: str | Ids, max_new_tokens: int = 64, request: str | None = None) -> Answer:
        """The target's greedy continuation of a prompt that the source reads first."""
        *_, last = self.stream(prompt, max_new_tokens, request)
        assert isinstance(last, Answer)
        return last

    @torch.inference_mode()
    def stream(self, prompt: str | Ids, max_new_tokens: int = 64, request: str | None = None) -> Iterator[str | Answer]:
        """The same piece by piece; the last thing is the whole ``Answer``."""
        ids = self.tokens(prompt)
        if ids.shape[0] != 1:
            raise KvxferError(f"generate: one prompt at a time, and these are {ids.shape[0]}; use transfer for several")
        handed = self._hand(lambda: self._source(ids), ids, request)
        running, rest = Running(handed.cache), ids[:, _tokens(handed.cache) :].to(self.pair.target.device)
        new: list[int] = []
        yield from spoken(self.pair.target, running, rest, max_new_tokens, new)
        yield Answer(self.pair.tokenizer.decode(new), torch.tensor(new, dtype=torch.int64), handed.record)

    def tokens(self, prompt: str | Ids) -> Ids:
        """A prompt's tokens; ids stay what they are."""
        if not isinstance(prompt, str):
            return prompt
        found = self.pair.tokenizer(prompt)["input_ids"]
        if not found:
            raise KvxferError("generate: the prompt has no tokens")
        return torch.tensor([found], dtype=torch.int64)

    def _source(self, ids: Ids) -> tuple[KV, float]:
        """The source's cache of a prompt's head; its reading is no part of the handoff."""
        head = ids[:, : max(ids.shape[1] - self.plan.hold_back, 1)]
        assert self._transfer is not None
        return self._transfer.prefill(head), self._clock()

    def _hand(self, read: Callable[[], tuple[KV, float | None]], ids: Ids, request: str | None) -> Handed:
        request = uuid.uuid4().hex if request is None else request
        watch = self.watch()

        def work(transfer: Transfer) -> Handed:
            cache, began = read()
            if began is not None:
                watch.started = watch.last = began
            return self._apply(transfer, cache, ids, request, watch)

        found = self.attempt(ids.shape[1], watch, work, self.plan.exact_first + self.plan.hold_back + 1)
        return self._fall_back(ids, request, watch, found) if isinstance(found, Refusal) else found

    def watch(self) -> Watch:
        """A clock that begins now, with the policy's deadline."""
        return Watch(self._clock, self.policy.deadline_ms, self.pair.target.device)

    def attempt(self, tokens: int, watch: Watch, work: Callable[[Transfer], Found], least: int = 1) -> Found | Refusal:
        """What ``work`` makes of so many tokens with the transfer, or why it was not wanted or failed.

        Fewer than ``least`` are refused, since they leave nothing to map.

        Nothing is raised but what ends the process: a failure counts for the breaker, and has a name.
        """
        try:
            self._before(tokens, least)
        except Declined as declined:
            return declined.refusal
        assert self._transfer is not None
        try:
            with _told():
                found = work(replace(self._transfer, watch=watch.look))
        except Declined as declined:
            self.breaker.failed() if declined.failed else self.breaker.left()
            return declined.refusal
        except BaseException:
            self.breaker.failed()
            raise
        self.breaker.succeeded()
        return found

    def _before(self, tokens: int, least: int) -> None:
        """All that can be said without the cache."""
        admission = self.admission
        if (refusal := admission.unsupported or admission.refusal) is not None:
            raise Declined(refusal)
        if tokens < admission.min_tokens:
            why = f"{tokens} tokens are fewer than the {admission.min_tokens} from which on a handoff is used"
            raise Declined(Refusal("too_short", why))
        try:
            self.pair.check_length(tokens, "prompt")
        except KvxferError as error:
            raise Declined(Refusal("too_long", str(error))) from error
        if tokens < least:
            raise Declined(Refusal("too_short", f"the plan leaves nothing of {tokens} tokens to map"))
        if not self.breaker.passes():
            pause = f"{self.policy.retry_after:g} s"
            why = f"{self.policy.failures} handoffs in a row failed; it is tried again after {pause}"
            raise Declined(Refusal("breaker_open", why))

    def _apply(self, transfer: Transfer, cache: KV, ids: Ids, request: str, watch: Watch) -> Handed:
        """The transfer itself, checked; what is wrong with it raises."""
        pair = self.pair
        _check_cache(cache, ids, pair)
        # A cache of fewer tokens than the plan would map leaves the others to the target.
        stop = min(self.plan.mapped_span(ids.shape[1])[1], cache.tokens)
        if stop <= self.plan.exact_first:
            raise Declined(Refusal("too_short", f"the source's cache of {cache.tokens} tokens leaves nothing to map"))
        head, first = ids[:, :stop].to(pair.target.device), min(self.plan.exact_first, stop)
        cache = cache.span(0, stop) if cache.tokens > stop else cache
        watch.after("export")
        watch.look()
        exact = transfer.exact(head)
        watch.after("exact")
        handed = transfer.handed(cache, head, exact)
        watch.after("map")
        watch.look()
        self.check(handed.span(first, stop))
        watch.after("check")
        if self._shadowed(request):
            return self._shadow(handed, ids, request, watch)
        built = build_cache(handed)
        watch.after("inject")
        record = HandoffRecord(
            request=request,
            status=APPLIED,
            reason=None,
            why=None,
            mapped=ids.shape[0] * (stop - first),
            exact=ids.shape[0] * (first + ids.shape[1] - stop),
            milliseconds=dict(watch.parts),
            bytes=sum(part.nbytes for part in (*handed.keys, *handed.values)),
            flops_share=self._share(ids.shape[1], ids.shape[1] - stop),
            map=self.hash,
        )
        return self._kept(built, ids, record)

    def check(self, mapped: KV) -> None:
        """Refuse what is not finite, or far longer or shorter than calibration saw, by target layer and kind."""
        assert self._map is not None
        scaling = self.pair.target.geometry.rotary.scaling
        names, lengths = [], []
        for kind, layers in (("keys", mapped.keys), ("values", mapped.values)):
            turned = scaling if kind == "keys" else 1.0
            for layer, part in enumerate(layers):
                names.append(f"{kind}.{layer}")
                # Over heads and sizes, then of all tokens: a rotation changes no length.
                lengths.append(part.float().square().sum(dim=(1, 3)).mean().sqrt() / turned)
        for name, length in zip(names, torch.stack(lengths).tolist(), strict=True):
            usual = self._map.manifest["norms"][name]
            if not length < float("inf"):
                raise Declined(
                    Refusal("not_finite", f"the mapped {name} are not finite, or too long for float32"), failed=True
                )
            if not usual / self.policy.norms <= length <= usual * self.policy.norms:
                why = f"the mapped {name} are {length:.3g} long, and {usual:.3g} in calibration"
                raise Declined(Refusal("norms", why), failed=True)

    def _shadowed(self, request: str) -> bool:
        """Whether a request is one of the share that the target reads too; the same for the same id everywhere."""
        drawn = int.from_bytes(hashlib.sha256(request.encode()).digest()[:8], "big") / 2**64
        return drawn < self.policy.shadow

    def _shadow(self, handed: KV, ids: Ids, request: str, watch: Watch) -> Handed:
        """The target's own prefill is served, and what the mapped cache would have said is recorded beside it."""
        target, ids = self.pair.target, ids.to(self.pair.target.device)
        own = target.prefill(ids[:, :-1])
        watch.after("prefill")
        said = target.logits(ids[:, handed.tokens :], handed, keep=1)[:, -1].log_softmax(-1)
        true = target.logits(ids[:, -1:], own, keep=1)[:, -1].log_softmax(-1)
        shadow = {
            "agrees": bool((said.argmax(-1) == true.argmax(-1)).all()),
            "kl": float((true.exp() * (true - said)).sum(-1).mean()),
        }
        why = "this request is one of policy.shadow: the target read the prompt too, and its own answer is served"
        record = self._own(ids, request, watch, Refusal("shadow", why))
        return self._kept(build_cache(own), ids, replace(record, shadow=shadow))

    @property
    def hash(self) -> str | None:
        """The map's; None where it can't be read."""
        return None if self._map is None else self._map.hash

    def share_of_new(self, start: int, stop: int, mapped: int) -> float:
        """FLOPs of bringing the target from ``start`` to ``stop`` tokens, against its own reading of them."""
        assert self._map is not None
        return new_tokens_share(self._map, self.pair.target.geometry, start, stop, mapped)

    def _share(self, prompt: int, held_back: int) -> float:
        assert self._map is not None
        return handoff_share(self._map, self.pair.target.geometry, self.plan.holding_back(held_back), prompt)

    def _fall_back(self, ids: Ids, request: str, watch: Watch, refusal: Refusal) -> Handed:
        """The target's own prefill of all but the last token."""
        watch.restart()
        target = self.pair.target
        running = target.begin(ids[:, :-1].to(target.device)) if ids.shape[1] > 1 else target.inject(None)
        watch.after("prefill")
        return self._kept(running.cache, ids, self._own(ids, request, watch, refusal))

    def _own(self, ids: Ids, request: str, watch: Watch, refusal: Refusal) -> HandoffRecord:
        """The record of a prompt that the target read itself."""
        return HandoffRecord(
            request=request,
            status=FALLBACK if self.admission.unsupported is None else UNSUPPORTED,
            reason=refusal.reason,
            why=refusal.why,
            mapped=0,
            exact=ids.numel(),
            milliseconds=dict(watch.parts),
            bytes=0,
            flops_share=1.0,
            map=self.hash,
        )

    def _kept(self, cache: Any, ids: Ids, record: HandoffRecord) -> Handed:
        self.accounts.keep(record)
        return Handed(cache, ids.to(self.pair.target.device), record, self._keyword)


def _spec(wanted: dict[str, Any], source: str, target: str, device: str) -> PairSpec:
    """How a map's manifest says that its two models are run."""

    def model(name: str, side: str) -> ModelSpec:
        own = wanted.get(side, {})
        return ModelSpec(name, own.get("revision", "main"), tuple(own.get("drop_layers", ())))

    return PairSpec(
        "handoff",
        model(source, "source"),
        model(target, "target"),
        dtype=wanted.get("dtype", "bfloat16"),
        device=device,
    )


def _policy(given: Policy | str | Path | None) -> Policy:
    """The strict policy, unless another is given."""
    if isinstance(given, Policy):
        return given
    return Policy() if given is None else Policy.read(Path(given).expanduser())


def _loaded(folder: Path) -> CacheMap | Refusal:
    """A map, or why there is none to use."""
    try:
        return CacheMap.load(folder)
    except KvxferError as error:
        return Refusal("artifact", str(error))


def _as_kv(cache: Any, pair: Pair) -> KV:
    return cache if isinstance(cache, KV) else read_cache(cache, pair.source.name)


def _tokens(cache: Any) -> int:
    return int(cache.get_seq_length())


def _check_cache(cache: KV, ids: Ids, pair: Pair) -> None:
    """Refuse a cache that is not the source's of this prompt, by its shape."""
    geometry = pair.source.geometry
    shape = (ids.shape[0], geometry.kv_heads, cache.tokens, geometry.head_dim)
    wrong = [part.shape for part in (*cache.keys, *cache.values) if tuple(part.shape) != shape]
    if cache.layers != geometry.layers or wrong:
        found = f"{cache.layers} layers" + (f" of {tuple(wrong[0])}" if wrong else "")
        why = f"the source's cache has {found}, and {pair.source.name} makes {geometry.layers} of {shape}"
        raise Declined(Refusal("cache_shape", why), failed=True)
    if cache.tokens > ids.shape[1]:
        why = f"the source's cache has {cache.tokens} tokens, and the prompt {ids.shape[1]}"
        raise Declined(Refusal("cache_length", why), failed=True)


@contextmanager
def _told() -> Iterator[None]:
    """Whatever is raised within becomes a failed transfer with a name; only what ends the process goes on."""
    try:
        yield
    except Declined:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise Declined(Refusal("out_of_memory", _one_line(error)), failed=True) from error
    except Exception as error:
        raise Declined(Refusal("error", f"{type(error).__name__}: {_one_line(error)}"), failed=True) from error


def _one_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
