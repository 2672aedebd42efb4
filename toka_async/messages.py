"""Every message between the processes: tagged, positional, frozen structs, one union per channel.

Per-row data travels as *columns*: int32/float32/bool byte fields (`toka_async.arrays`). Ids are integers; strings such
as `cmpl-…` exist only in the OpenAI layer. Knows no sockets and no component's inner state.

Channels: server -> scheduler (`ToScheduler`), scheduler -> server (`ToServer`), scheduler -> rank (`ToRank`),
rank -> scheduler (`FromRank`).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import msgspec

from toka_async.arrays import EMPTY
from toka_async.control import DEFAULT_VERSION, Control, ControlDone


class Reason(IntEnum):
    """Why a sequence ended; NONE while it runs."""

    NONE = 0
    STOP = 1  # it sampled one of its end tokens, which is its last token id
    LENGTH = 2  # it reached max_tokens
    STOP_STRING = 3  # the server found a stop string in its text
    ABORT = 4  # it was aborted; what it has of tokens is valid
    ERROR = 5  # its grammar failed; what it has of tokens is valid

    @property
    def is_cut(self) -> bool:
        """Whether the model had not ended its output: more might have come."""
        return self in (Reason.LENGTH, Reason.ABORT, Reason.ERROR)


class LogprobKind(IntEnum):
    """The distribution that log-probs of generated tokens are of."""

    RAW = 0  # the model's own, before all below
    TEMPERATURE = 1  # after allowed tokens, bias, penalties and temperature; a greedy row's temperature counts as 1
    PROCESSED = 2  # after min_p, top_k and top_p too: the one that is sampled from


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A part of a message: positional on the wire, without a tag."""


class Tagged(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=True):
    """A whole message: positional on the wire, tagged with its class's name."""


class TokenSampling(Message, frozen=True, kw_only=True):
    """How the tokens of one request are chosen, the same for all of its samples.

    `temperature` 0 is greedy, and any other is large enough to divide by in float32; `top_k` 0, `top_p` 1 and `min_p` 0
    are off. Filters act on the temperature-scaled distribution after penalties and bias.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0  # end_ids cannot be sampled before this many tokens
    end_ids: memoryview = EMPTY  # int32 [e]: token ids that end a sequence
    bias_ids: memoryview = EMPTY  # int32 [b]: logit_bias
    bias_values: memoryview = EMPTY  # float32 [b]
    num_logprobs: int = -1  # -1 none, 0 the chosen token's, k also the k likeliest
    num_prompt_logprobs: int = -1  # the same for the prompt's tokens
    allowed_ids: memoryview = EMPTY  # int32 [a]: no other token id is sampled; empty: all are allowed
    logprob_kind: LogprobKind = LogprobKind.RAW
    prompt_temperature: float = 1.0  # by which log-probs of the prompt's tokens are scaled
    grammar: str = ""  # in llguidance's Lark, of the whole output; empty: none

    @property
    def wants_kept(self) -> bool:
        """Whether each token comes with how many tokens the filters kept, and their mass."""
        return self.num_logprobs >= 0 and self.logprob_kind is LogprobKind.PROCESSED


# ---- server -> scheduler ---------------------------------------------------------------------------------------------


class Submit(Message, frozen=True, kw_only=True):
    """A request, one of a Submits: one prompt, `n` samples of it. Lower `priority` first, then order of arrival.

    `max_tokens` 0 (with `num_prompt_logprobs` >= 0) computes the prompt only. Sample i draws from its own random
    stream, derived from `seed` and i. `stop_id` names a `StopMask` sent before, or -1. Only requests of equal `salt`
    (0 to 2^63 - 1) share cached prompts.
    """

    request_id: int
    prompt: memoryview  # int32 [p], p >= 1
    n: int = 1
    max_tokens: int
    seed: int
    sampling: TokenSampling
    stream: bool = False  # send tokens after every step, not once at the end
    priority: int = 0
    stop_id: int = -1
    salt: int = 0


class Submits(Tagged, frozen=True, kw_only=True):
    """Requests in order, each as a Submit says; they differ in their prompts, seeds and max_tokens only."""

    request_ids: memoryview  # int32 [r]
    lengths: memoryview  # int32 [r]: tokens of each prompt, at least 1
    prompts: memoryview  # int32 [sum(lengths)], one after the other
    seeds: memoryview  # int64 [r]
    max_tokens: memoryview  # int32 [r]
    n: int = 1
    sampling: TokenSampling
    stream: bool = False
    priority: int = 0
    stop_id: int = -1
    salt: int = 0


class Cancels(Tagged, frozen=True, kw_only=True):
    """The clients have left: end all samples of the requests without an answer."""

    request_ids: memoryview  # int32 [r]


class StopMask(Tagged, frozen=True, kw_only=True):
    """Registers a set of stop strings: the token ids that can complete one of them."""

    stop_id: int
    mask: memoryview  # bool [vocab]
    window: int  # how many last token ids are needed to decide (bytes of the longest string, plus one)


class DropStop(Tagged, frozen=True, kw_only=True):
    """Forget a StopMask, which no running request uses."""

    stop_id: int


class EndSample(Tagged, frozen=True, kw_only=True):
    """A stop string was found: the sample ends after its first `num_tokens` tokens (at least 1)."""

    request_id: int
    sample: int
    num_tokens: int


class AskStats(Tagged, frozen=True, kw_only=True):
    """Asks for Stats in this turn, whatever was sent before. `number`: the question's, from 1."""

    number: int
    forecast: bool = False  # include a forecast


ToScheduler = Submits | Cancels | StopMask | DropStop | EndSample | AskStats | Control


# ---- scheduler -> server ---------------------------------------------------------------------------------------------


class RankDevice(Message, frozen=True, kw_only=True):
    """A rank's device and the bytes of its memory when the rank is ready; all bytes are 0 if nothing is computed.

    `used`: bytes that the rank has taken in all; `free`: bytes of `total` that no process has taken.
    """

    rank: int
    device: str  # for people: the GPU's name and memory, the CPU and its threads, or "simulated"
    dtype: str  # for people: of weights and activations, and of the cache if it differs; empty: nothing is computed
    weights: int = 0
    cache: int = 0
    used: int = 0
    free: int = 0
    total: int = 0


class Ready(Tagged, frozen=True, kw_only=True):
    """Rank -> scheduler -> server: weights are loaded and the cache is allocated; what fits."""

    num_pages: int
    page_size: int
    max_seqs: int
    max_context: int  # tokens, prompt and completion
    vocab_size: int  # ids below it are valid
    max_tokens: int = 2048  # of one step
    num_snapshots: int = 0  # of recurrent states, kept apart from those of rows; 0: the model has no such states
    # Pages of layers that see a window only, and the tokens that these see; 0: all layers see all tokens.
    num_window_pages: int = 0
    window: int = 0
    token_seconds: float = 0.0  # of a prompt's token in a large step, as the ranks measured it; 0: they did not
    # The smallest shared prefix that is worth a group of its own, as the rank measured it; 0: none is.
    group_min_seqs: int = 0
    group_min_tokens: int = 0
    async_tp_min_tokens: int = 0  # steps of this size are sharded over tensor ranks; 0: none
    # Filled in by the scheduler: the replica, and the number of its restarts.
    replica: int = 0
    life: int = 0
    ranks: tuple[RankDevice, ...] = ()  # a rank sends its own; the scheduler joins all of them


class Tokens(Tagged, frozen=True, kw_only=True):
    """New tokens of samples, one row a sample; all rows of one message want the same log-probs.

    The weights of version `versions[0]` generated the tokens of every row behind its spans. A span (row, end, number)
    says that those of `versions[number]` generated the row's tokens up to `end`, from the end of its span before.
    """

    request_ids: memoryview  # int32 [r]
    samples: memoryview  # int32 [r]
    counts: memoryview  # int32 [r]: tokens in the row, may be 0 in a row that only ends
    reasons: memoryview  # int32 [r]: Reason; not NONE means that the sample has ended
    token_ids: memoryview  # int32 [t], t = sum(counts), rows one after the other
    num_logprobs: int = -1
    logprobs: memoryview = EMPTY  # float32 [t] when num_logprobs >= 0
    top_ids: memoryview = EMPTY  # int32 [t, num_logprobs]
    top_logprobs: memoryview = EMPTY  # float32 [t, num_logprobs]
    kept: memoryview = EMPTY  # int32 [t] for `TokenSampling.wants_kept`: tokens that the filters kept
    masses: memoryview = EMPTY  # float32 [t], likewise: the share of the distribution that these have
    versions: tuple[str, ...] = (DEFAULT_VERSION,)
    spans: memoryview = EMPTY  # int32 [k, 3], those of a row in order


class Prefilled(Tagged, frozen=True, kw_only=True):
    """A request's prompt is computed. Sent once a request, before or with its first tokens.

    With prompt log-probs: entry i belongs to prompt token i + 1 (the first token has none); p - 1 entries.
    """

    request_id: int
    cached_tokens: int  # prompt tokens whose keys and values were found in the prefix tree
    logprobs: memoryview = EMPTY  # float32 [p - 1]
    top_ids: memoryview = EMPTY  # int32 [p - 1, num_prompt_logprobs]
    top_logprobs: memoryview = EMPTY  # float32 [p - 1, num_prompt_logprobs]
    ranks: memoryview = EMPTY  # int32 [p - 1]: of the prompt's tokens among all, from 1


class Prefills(Tagged, frozen=True, kw_only=True):
    """Prefilled of several requests, without prompt log-probs."""

    request_ids: memoryview  # int32 [r]
    cached_tokens: memoryview  # int32 [r]


class StopChecks(Tagged, frozen=True, kw_only=True):
    """Rows whose newest token can complete a stop string, with their last ids, for the server to check.

    The server answers with EndSample, or not at all. The sequences run on meanwhile.
    """

    request_ids: memoryview  # int32 [r]
    samples: memoryview  # int32 [r]
    num_tokens: memoryview  # int32 [r]: tokens generated up to and including the last of the window
    counts: memoryview  # int32 [r]: ids in the row's window
    token_ids: memoryview  # int32 [sum(counts)]


class Failed(Tagged, frozen=True, kw_only=True):
    """The request cannot be run; it has ended."""

    request_id: int
    message: str


class Forecast(Message, frozen=True, kw_only=True):
    """Pages that the running sequences will use, as admission expects it.

    `pages` are numbers at evenly spaced steps: the first belongs to the next step to be built, the last to the step
    `steps` later, when all sequences have ended.
    """

    steps: int
    pages: tuple[int, ...]
    limit: int  # nothing more is admitted when the forecast would rise above it


# Upper bounds of `Stats.token_gaps`, in seconds; the last bucket has none.
GAP_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
STEP_COSTS = ("step", "token", "key", "pair")  # of each step; of its tokens, and as `scheduler.time_predictor` says
SCHEDULER_STAGES = ("results", "requests", "steps", "messages")  # receive, receive, build, and send them


class Stats(Tagged, frozen=True, kw_only=True):
    """The scheduler's state and counters since start: sent when they changed, a few times a second at most, and on
    AskStats.

    `num_running` and `num_waiting` together are the samples that have not ended, except those whose last token is on
    its way while another one has their slot. A prompt that is computed for several samples counts as one that runs.
    """

    num_running: int = 0  # sequences that are computed
    num_waiting: int = 0  # sequences queued
    pages_used: int = 0  # pages owned by running sequences and their requests
    pages_cached: int = 0  # unowned pages in the prefix tree
    num_snapshots: int = 0  # of recurrent states, as in Ready
    snapshots_used: int = 0  # that prompts hold whose samples have not all started
    snapshots_cached: int = 0  # at pages of the prefix tree
    num_pages: int = 0
    num_window_pages: int = 0  # of layers with a window, as in Ready
    window_pages_used: int = 0  # that a running sequence or a prompt sees
    window_pages_cached: int = 0  # beside pages of the prefix tree, and not used
    prefix_queries: int = 0  # prompt tokens of all samples: a prompt counts for each sample of it
    prefix_hits: int = 0  # those not computed: found in the cache, or shared by samples of one request
    num_preemptions: int = 0
    prompt_tokens: int = 0  # computed, cached ones not counted
    generated_tokens: int = 0  # delivered
    wasted_tokens: int = 0  # computed after an end that was found late
    recomputed_tokens: int = 0  # computed again after a preemption
    num_steps: int = 0
    step_seconds: float = 0.0  # sum of the ranks' step times
    idle_seconds: float = 0.0  # ranks had no step queued though there was work: due to the scheduler
    device_idle_seconds: float = 0.0  # between steps that were queued in time
    num_compiles: int = 0  # after the ranks were ready; above 0, a rank was not warm
    depths: tuple[int, ...] = ()  # how often a step came back with 0, 1, … steps still queued behind it
    # Percentiles (50, 99, 100) of the newest times, in microseconds; empty: none yet.
    scheduler_us: tuple[float, ...] = ()  # the scheduler's CPU time for a step, from its results to the messages
    forecast_us: tuple[float, ...] = ()  # time of one forecast for admission
    expected_length: tuple[float, float] | None = None  # mean and spread for new sequences, as shares of max_tokens
    stage_seconds: tuple[float, ...] = ()  # CPU time of the scheduler in all, by SCHEDULER_STAGES
    replica: int = 0  # as in Ready
    life: int = 0
    num_started: int = 0  # requests whose prompt was opened
    queue_seconds: float = 0.0  # their time until then, in all
    # For each stage of a pipeline: seconds in steps, the part of it waiting for other stages, and between steps.
    pipeline: tuple[tuple[float, float, float], ...] = ()
    expert_loads: tuple[memoryview, ...] = ()  # int64 [experts] of each layer: tokens that chose them; [0]: has none
    prefix_shared: int = 0  # the part of `prefix_hits` that samples of one request share
    # Times between two tokens of a sample: their number by GAP_SECONDS, and their sum.
    token_gaps: tuple[int, ...] = ()
    token_gap_seconds: float = 0.0
    num_prompt_steps: int = 0  # steps that computed prompts, and their time
    prompt_step_seconds: float = 0.0
    step_costs: tuple[float, ...] = ()  # seconds that a step is expected to take, by STEP_COSTS
    masked_rows: int = 0  # tokens that were drawn by a grammar, and what masks took, as MaskWork says
    mask_seconds: float = 0.0
    mask_stall_seconds: float = 0.0
    answers: int = 0  # number of the newest AskStats so far; 0: none
    forecast: Forecast | None = None  # only if an AskStats wants it and admission makes one


ToServer = Ready | Tokens | Prefilled | Prefills | StopChecks | Failed | Stats | ControlDone


# ---- scheduler -> rank -----------------------------------------------------------------------------------------------


class Prompt(Message, frozen=True, kw_only=True):
    """A prompt as a rank must know it, to compute or continue its rows.

    `pages` are the full pages that rows admitted with this key share, in order; a row's own pages follow them. The
    first `num_prompt` ids are the user's prompt, the others tokens generated before a preemption (penalties differ).
    """

    key: int
    token_ids: memoryview  # int32 [p]
    num_prompt: int
    pages: memoryview  # int32 [full pages]
    sampling: TokenSampling


class Step(Tagged, frozen=True, kw_only=True):
    """One forward pass, as events since the step before it. A rank applies them in the order of the fields.

    Later chunks of the same pass read what chunks compute, but its decoding rows do not: stages of a pipeline compute
    the pass in parts, each with some of both.

    Rows are slots (0 <= slot < max_seqs). The pass computes one token for each decoding row, in row order, then the
    chunks of prompts. Sampled tokens come back in the same order: decoding rows, then chunks with `chunk_samples`.
    """

    step_id: int
    dropped_prompts: memoryview = EMPTY  # int32: keys no longer needed by rows admitted later
    freed: memoryview = EMPTY  # int32: slots that ended; they leave the decoding rows
    prompts: tuple[Prompt, ...] = ()
    # Admitted rows: the row's page table becomes the prompt's pages; its next token is the prompt's token `start`
    # at position `start`.
    admit_slots: memoryview = EMPTY  # int32 [a]
    admit_keys: memoryview = EMPTY  # int32 [a]: Prompt.key
    admit_starts: memoryview = EMPTY  # int32 [a]
    admit_seeds: memoryview = EMPTY  # int64 [a]: the row's random stream; draw i belongs to output token i
    # int32 [a]: the snapshot of the recurrent state that the row begins with, read before the pass; -1: it has none.
    admit_snapshots: memoryview = EMPTY  # empty: the model has no such states
    # Pages copied (source to target, all layers) before the pass; all are read before any is written.
    copy_sources: memoryview = EMPTY  # int32 [c]
    copy_targets: memoryview = EMPTY  # int32 [c]
    # Pages appended to rows' page tables, in order.
    page_slots: memoryview = EMPTY  # int32 [g]
    page_ids: memoryview = EMPTY  # int32 [g]
    # Pages that got a window page, where layers with a window keep them from this pass on. Known before all rows are.
    window_pages: memoryview = EMPTY  # int32 [w, 2]: page, window page
    # Slots that start decoding with this step; they append to the row order (`arrays.next_rows`).
    joined: memoryview = EMPTY  # int32 [j]
    # A whole new row order when it changed otherwise (grouping); empty: unchanged.
    order: memoryview = EMPTY  # int32 [rows]
    # Shared-prefix groups among the decoding rows (contiguous in row order); empty: there are none.
    group_starts: memoryview = EMPTY  # int32 [h]: first row of the group
    group_rows: memoryview = EMPTY  # int32 [h]: rows in it
    group_pages: memoryview = EMPTY  # int32 [h]: leading pages that all of its rows share
    # Chunks of prompts.
    chunk_slots: memoryview = EMPTY  # int32 [k]
    chunk_lengths: memoryview = EMPTY  # int32 [k]: tokens of the prompt from the row's position on
    chunk_samples: memoryview = EMPTY  # bool [k]: sample from the chunk's last position
    # Recurrent states that the pass keeps: that of the slot after so many tokens of its chunk, in a snapshot.
    save_slots: memoryview = EMPTY  # int32 [v]
    save_lengths: memoryview = EMPTY  # int32 [v]
    save_snapshots: memoryview = EMPTY  # int32 [v]
    # Passes of the same decoding rows and groups, each with a StepDone of its own: step_id, step_id + 1, …
    num_passes: int = 1

    def passes(self) -> Iterator[Step]:
        """Split the step into single passes; the events belong to the first."""
        yield self if self.num_passes == 1 else msgspec.structs.replace(self, num_passes=1)
        for i in range(1, self.num_passes):
            yield Step(
                step_id=self.step_id + i,
                group_starts=self.group_starts,
                group_rows=self.group_rows,
                group_pages=self.group_pages,
            )


ToRank = Step | Control


# ---- rank -> scheduler -----------------------------------------------------------------------------------------------


class ChunkLogprobs(Message, frozen=True, kw_only=True):
    """Log-probs of prompt tokens computed by one chunk: entry i belongs to the token at position start + 1 + i."""

    slot: int
    start: int
    logprobs: memoryview  # float32 [m]
    ranks: memoryview  # int32 [m]: of the tokens among all, from 1
    num_top: int
    top_ids: memoryview = EMPTY  # int32 [m, num_top]
    top_logprobs: memoryview = EMPTY  # float32 [m, num_top]


class ExpertLoads(Tagged, frozen=True):
    """How many tokens chose each expert, since the stage's last message; sent now and then."""

    layers: tuple[int, ...]  # numbers of those of the stage that have experts
    counts: tuple[memoryview, ...]  # int32 [experts] of each


class MaskWork(Message, frozen=True):
    """What masks of grammars took in a step: rows, seconds of the host, and seconds that the device waited for it."""

    rows: int
    seconds: float
    stalled: float


class StepDone(Tagged, frozen=True, kw_only=True):
    """The results of one Step, in the order in which it samples."""

    step_id: int
    token_ids: memoryview  # int32 [s]
    logprobs: memoryview = EMPTY  # float32 [s] when any row of the step wants log-probs
    top_rows: memoryview = EMPTY  # int32 [t]: rows of s with likeliest tokens
    top_counts: memoryview = EMPTY  # int32 [t]: likeliest tokens of each
    top_ids: memoryview = EMPTY  # int32 [sum(top_counts)]
    top_logprobs: memoryview = EMPTY  # float32 [sum(top_counts)]
    # int32 and float32 [s] when filters of any row are measured: tokens that they keep, and their share of the
    # distribution; 0 and 1 in rows without.
    kept: memoryview = EMPTY
    masses: memoryview = EMPTY
    prompts: tuple[ChunkLogprobs, ...] = ()
    seconds: float = 0.0  # on the device
    waited: float = 0.0  # seconds that the device was idle before this step
    num_compiles: int = 0  # kernels and graphs compiled since the rank was ready; above 0, it was not warm
    stalled: float = 0.0  # seconds of `seconds` in which the device waited for other stages
    loads: ExpertLoads | None = None  # between the runner and its process
    broken: memoryview = EMPTY  # int32: rows of s whose grammar failed; their tokens are none
    masks: MaskWork | None = None  # None: no row has a grammar


class StageTimes(Tagged, frozen=True):
    """How a pipeline stage spent its time, in seconds since the rank was ready; sent now and then."""

    stage: int
    seconds: float  # in steps, from the time at which they could begin
    stalled: float  # the part of it waiting for other stages
    waited: float  # between steps


FromRank = Ready | StepDone | StageTimes | ExpertLoads | ControlDone
