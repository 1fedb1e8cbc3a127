"""The settings of an engine, validated on creation."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from exspec.actors.engine.drafters.early_exit_settings import EarlyExitSettings
from exspec.actors.engine.drafters.registry import DRAFTERS, NONE, check_name
from exspec.actors.engine.drafters.window_settings import WindowSettings
from exspec.actors.engine.settings import setting, settings_of

Method = Literal["plain", "eqspec", "exspec"]
METHODS: tuple[Method, ...] = get_args(Method)
AttentionName = Literal["auto", "in_place", "gathered"]
ATTENTIONS: tuple[AttentionName, ...] = get_args(AttentionName)
KernelsName = Literal["eager", "packed", "compiled", "compiled_packed"]
KERNELS: tuple[KernelsName, ...] = get_args(KernelsName)
UNPACKED: dict[KernelsName, KernelsName] = {"packed": "eager", "compiled_packed": "compiled"}
COMPILED: tuple[KernelsName, ...] = ("compiled", "compiled_packed")
DRAFTING = tuple(f.name for own in (EarlyExitSettings, WindowSettings) for f in fields(own))  # settings of drafters
DraftLengthName = Literal["fixed", "explicit", "implicit", "both"]
DRAFT_LENGTHS: tuple[DraftLengthName, ...] = get_args(DraftLengthName)


@dataclass(frozen=True)
class EngineConfig(EarlyExitSettings, WindowSettings):
    """How an engine decodes. Fields with a `setting` are for users, and its help describes them. Others are internal.

    With `exact`, the shape of the forward that computes a token depends only on the token's position and on these
    settings, except method and drafter. So the token does not depend on other rows, acceptance, admission order or
    retries. Otherwise shapes follow the rows. eqspec grows its cache and never has fixed shapes.

    method: eqspec speculates on a fixed batch that is realigned every round; exspec in groups of similar length, taken
        from a window that is refilled while rows end.
    window: with eqspec, more slots than B would only wait: the engine has B. If any rows can form a group, it has as
        many as the rounds need, and some to spare.
    columns: width of a verify forward; default K + 1 (plain: 1). Additional columns are dead, or hold tokens of a given
        completion: `plain` with `columns = K + 1` is the reference in the shape of speculation.
    draft_from: with fixed shapes, rows with at most so many tokens have forwards of their own, with one column.
    bucket: a row attends to its length rounded up to a multiple of it; rows of one bucket form a group. With attention
        in place, all lengths share one bucket.
    capacity: counts prompt and completion together.
    page: tokens of a page of KV; at most a prefill chunk. pages: how many; default: enough to fill all slots but the
        spare ones. With fewer, fewer sequences run at once.
    attention: `in_place` reads KV from its pages; `gathered` first copies a row's pages together, and works on every
        device; `auto` is `in_place` if a trial on the device shows that it works.
    draft_length: `explicit` judges by the draft's own confidence, `implicit` by the sequence's acceptance so far.
    kernels: what runs a model. `eager`: transformers' modules. `compiled`: programs of few kernels (see programs.py);
        eager if compilation fails or attention is not in place. `packed` and `compiled_packed`: the same with linear
        layers in a faster layout, as a second copy of the weights; for CPUs.
    prefill_rows, prefill_columns: P and C. Prompts are prefilled in chunks of C tokens, with P chunks in a forward.
    embeds: requests get hidden states instead of tokens, and the target needs no output head. Needs method plain.
    overlap: the engine commits a round while the device works on the next one, which has other sequences. Default: on
        CUDA with attention in place, and if the target is on several devices. Only with fixed shapes.
    devices: how many devices the target's layers lie on; the engine sets it.

    Raises ValueError naming the setting that is out of range.
    """

    method: Method = setting(
        "exspec", f"{', '.join(METHODS)}, or auto: the faster of plain and exspec.", "any if exact", measured=True
    )
    drafter: str = setting(
        "model",
        f"What proposes tokens: {', '.join(DRAFTERS)}; auto: the fastest that is available.",
        "any if exact",
        measured=True,
    )
    batch_size: int = setting(8, "B: rows of a forward.", measured=True, ge=1)
    window: int = setting(24, "W: slots of the pool.", measured=True, ge=1)
    draft_tokens: int = setting(5, "K: tokens drafted a round.", measured=True, ge=1)
    columns: int | None = None
    draft_from: int = setting(
        0,
        "A row decodes as plain until it has more tokens than this, prompt included.",
        measured=True,
        ge=0,
    )
    bucket: int = setting(512, "KV columns of a length bucket.", measured=True, ge=1)
    capacity: int = setting(
        1024, "Longest request in tokens. Default: the model's context, 4096 at most.", unset=True, ge=2
    )
    draft_length: DraftLengthName = setting(
        "fixed", "How long a draft gets: fixed (K), or shorter: explicit, implicit or both.", "any"
    )
    threshold: float = setting(
        0.3,
        "Chance of acceptance below which a draft ends, unless fixed. Default: what pays, or 0.3.",
        "any if exact",
        unset=True,
        gt=0,
        lt=1,
    )
    prefill_rows: int = 4
    prefill_columns: int = 32
    page: int = 32
    pages: int | None = None
    attention: AttentionName = "auto"
    kernels: KernelsName = "eager"
    overlap: bool | None = None
    devices: int = 1
    exact: bool = setting(True, "Fixed shapes: a row's tokens depend on the row alone.")
    embeds: bool = False

    def __post_init__(self) -> None:
        for name, known in SETTINGS.items():
            if self.drafts or name != "draft_tokens":
                known.check(getattr(self, name))
        check_name(self.drafter)
        if self.drafter == NONE and self.drafts:
            raise ValueError(f"method {self.method} needs a drafter; use method plain to decode without one")
        if self.embeds and self.drafts:
            raise ValueError(f"embeds: expected method plain, not {self.method}")
        if self.kernels not in KERNELS:
            raise ValueError(f"kernels: expected one of {', '.join(KERNELS)}, not {self.kernels!r}")
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention: expected one of {', '.join(ATTENTIONS)}, not {self.attention!r}")
        for name in ("prefill_rows", "prefill_columns", "page"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a positive number, not {getattr(self, name)}")
        if self.window < self.batch_size:
            raise ValueError(f"window: expected at least batch_size ({self.batch_size}), not {self.window}")
        if self.fixed_shapes and self.bucket < self.width:
            raise ValueError(
                f"bucket: expected at least the verify width ({self.width}) with exact, not {self.bucket}; "
                "smaller buckets need exact = false"
            )
        if self.prefill_columns % self.page_size:
            raise ValueError(f"prefill_columns: expected a multiple of page ({self.page}), not {self.prefill_columns}")
        if self.pages is not None and self.pages < self.fewest_pages:
            raise ValueError(
                f"pages: expected at least {self.fewest_pages}, enough for one sequence of {self.capacity} tokens, not "
                f"{self.pages}"
            )
        if self.draft_window is not None:
            self._check_window(self.draft_window)
        if self.columns is not None and self.columns < self.drafted + 1:
            raise ValueError(f"columns: expected at least {self.drafted + 1} (drafts and one more), not {self.columns}")

    def _check_window(self, window: int) -> None:
        if self.method == "eqspec":
            raise ValueError("draft_window: method eqspec moves the KV of whole rows; expected method exspec")
        if window < self.page_size:
            raise ValueError(f"draft_window: expected at least a page ({self.page_size} tokens), not {window}")
        if window >= self.capacity:
            raise ValueError(f"draft_window: expected fewer tokens than the capacity ({self.capacity}), not {window}")

    @property
    def drafts(self) -> bool:
        return self.method != "plain"

    @property
    def drafted(self) -> int:
        """K, or 0 for plain."""
        return self.draft_tokens if self.drafts else 0

    @property
    def width(self) -> int:
        """Columns of a verify forward."""
        return self.columns or self.drafted + 1

    def drafted_at(self, length: int) -> int:
        """Drafts of a row with so many cached tokens: all but its last one."""
        return self.drafted if length >= self.draft_from else 0

    def width_at(self, length: int) -> int:
        """Columns of a verify forward of rows with so many cached tokens."""
        return self.width if length >= self.draft_from else 1

    @property
    def alike(self) -> bool:
        """Whether any rows can form a group."""
        return self.bucket >= self.capacity and not self.split_from

    @property
    def split_from(self) -> int:
        """Cached tokens from which the forwards of a row have another width. 0: all have the same, or shapes follow the
        rows."""
        return self.draft_from if self.fixed_shapes and self.width > 1 else 0

    @property
    def widest(self) -> int:
        """Columns of the widest forward; those of a verify may be fed to the drafter one position later."""
        return max(self.width + 1, self.prefill_columns)

    @property
    def fixed_shapes(self) -> bool:
        return self.exact and self.method != "eqspec"

    @property
    def packs(self) -> bool:
        return self.kernels in UNPACKED

    @property
    def compiles(self) -> bool:
        return self.kernels in COMPILED

    @property
    def slots(self) -> int:
        if self.method == "eqspec":
            return self.batch_size
        if not self.alike:
            return self.window
        return min(self._busy + min(self.prefill_rows, self.batch_size), self.window)

    @property
    def spare(self) -> int:
        """Slots that may be free without leaving rows of a round empty. Their prompts wait for each other, to fill a
        prefill forward together."""
        return max(self.slots - self._busy, 0) if self.alike else 0

    @property
    def _busy(self) -> int:
        """Sequences of the rounds that the engine works on at once, if all lengths share one bucket."""
        return (self.devices + 1) * self.batch_size if self.overlap and self.fixed_shapes else self.batch_size

    @property
    def page_size(self) -> int:
        """Tokens of a page, limited to a prefill chunk, which consists of whole pages."""
        return min(self.page, self.prefill_columns)

    @property
    def fewest_pages(self) -> int:
        """Pages of one sequence that fills the capacity."""
        return -(-self.capacity // self.page_size)

    @property
    def page_count(self) -> int:
        return self.pages or (self.slots - self.spare) * self.fewest_pages

    def plain(self) -> "EngineConfig":
        """Plain decoding in this config's shapes: the reference for its tokens."""
        plain = replace(self, method="plain", drafter=NONE, columns=self.width)
        return replace(plain.drafting({}), draft_length="fixed", threshold=EngineConfig.threshold)

    def drafting(self, settings: dict[str, Any]) -> "EngineConfig":
        """This config with these settings of one drafter, and no settings of any other."""
        unset: dict[str, Any] = dict.fromkeys(DRAFTING)
        return replace(self, **unset | settings)

    def round_shape(self, live: int, longest: int) -> tuple[int, int]:
        """Rows and KV columns of a round with `live` sequences, the longest of which has `longest` tokens."""
        if self.fixed_shapes:
            return self.batch_size, self.kv_columns(longest)
        return live, min(longest + self.width - 1, self.capacity)

    def kv_columns(self, length: int) -> int:
        """KV columns that a row of `length` tokens attends to: whole buckets, at most the capacity."""
        return min(-(-length // self.bucket) * self.bucket, self.capacity)


SETTINGS = settings_of(EngineConfig)  # for users: in job files, as flags, and in the benchmark
