"""One stage of a step on one worker: what runs inside a Spark task.

`run_stage` is a function of its arguments, the shards on this host and the input files; it does not
know Spark, so a test can run any stage again, twice, or at the wrong time.

STG-1  No write transaction is opened before all senders' blobs are there (`check_complete`).
STG-2  Staged output files are synced before the shards commit, and the shards commit before a blob leaves.
STG-3  Nothing depends on the number of workers but who does the work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import polars as pl

from anabranch.connect.sink import Sink
from anabranch.connect.sinks import parquet
from anabranch.connect.source import OnBad, Slice, frame_schema
from anabranch.errors import InputChangedError, RecordError
from anabranch.flow.plan import DEAD_LETTER_SCHEMA, DEAD_LETTERS, Channel, Plan, Planned
from anabranch.model.batch import HASH, MAJOR, MINOR, ORDER, ORDER_SCHEMA, ORIGIN, STEP, U64, WEIGHT, visible
from anabranch.model.contenthash import content_hash
from anabranch.model.hashing import hash_columns, shard_of, zset_hash
from anabranch.model.ids import OperatorId, WorkerId
from anabranch.operators.kernel import Combining, Context, DeadLetter, Guard
from anabranch.operators.userfn import Poisoned
from anabranch.spark import streaming
from anabranch.spark.blob import Blob, Packed, check_complete, encode, pack_frame
from anabranch.spark.crumbs import isolation
from anabranch.spark.moving import STATE, arrived_state, collect_leaving
from anabranch.spark.reads import without_lost
from anabranch.spark.shards import StageState, run_with_state, weigh_copies
from anabranch.spark.spec import Assigned, Lost, Report, StepSpec
from anabranch.state.store import ShardStore
from anabranch.storage import open_storage

_NOTHING = pl.DataFrame()


def run_stage(
    plan: Plan, spec: StepSpec, stage: int, worker: WorkerId, arrived: Iterable[bytes]
) -> Iterator[tuple[int, bytes]]:
    """Run a stage; yields (receiver, blob) for the next stage, or the last stage's reports as one blob."""
    started = time.perf_counter()
    # Here and not only where shards are opened: a process may have none left.
    ShardStore.forget_gone()
    blobs = check_complete(spec, stage, worker, arrived) if stage > 0 else []
    received = time.perf_counter()
    moving, collected = collect_leaving(plan, spec, stage, worker) if spec.moving else ([], {})
    with isolation(spec, stage, worker) as guard:
        result, written = run_with_state(
            plan,
            spec,
            stage,
            worker,
            lambda state: _StageRun(plan, spec, stage, worker, blobs, state, guard)(),
            arrived_state(blobs) if spec.moving else (),
        )
    for goal, packed in moving:
        result.leaving[goal].append(packed)
    report = result.report
    report.touched, report.undo_bytes = written
    report.collected = collected
    if spec.weigh and stage == plan.depth:
        report.sizes = weigh_copies(spec, worker)
    report.seconds["receive"] = received - started
    report.seconds["run"] = time.perf_counter() - received
    reports = [wire for blob in blobs for wire in blob.reports] + [report.to_wire()]
    if stage == plan.depth:
        yield worker, encode(spec, stage + 1, worker, (), reports)
        return
    for receiver in range(spec.workers):
        mine = reports if receiver == worker else ()
        yield receiver, encode(spec, stage + 1, worker, result.leaving[receiver], mine)


class StageResult:
    """Frames that leave a stage, by receiver, and its report."""

    def __init__(self, report: Report, leaving: list[list[Packed]]) -> None:
        self.report = report
        self.leaving = leaving


class _StageRun:
    """Runs the operators of one stage over one set of arrived blobs.  Used once."""

    def __init__(
        self,
        plan: Plan,
        spec: StepSpec,
        stage: int,
        worker: WorkerId,
        blobs: list[Blob],
        state: StageState,
        guard: Guard | None,
    ) -> None:
        self.plan = plan
        self.spec = spec
        self.stage = stage
        self.worker = worker
        self.state = state
        self.guard = guard
        self.frames: dict[OperatorId, pl.DataFrame] = {}
        # What was aggregated while an input was read; `frames` need not have its rows then.
        self.partials: dict[int, pl.DataFrame] = {}
        self.streamed: set[OperatorId] = set()
        self.arrived: dict[int, list[Packed]] = {}
        for blob in blobs:
            for packed in blob.frames:
                if packed.channel != STATE:
                    self.arrived.setdefault(packed.channel, []).append(packed)
        self.channels = {channel.number: channel for channel in plan.channels}
        # A channel's frame is wanted by each of its consumers; unpacking and sorting it is done once.
        self.unpacked: dict[int, pl.DataFrame] = {}
        self.dead: list[DeadLetter] = []
        self.report = Report(worker, stage, spec.layout.workers[worker], os.getpid())

    def __call__(self) -> StageResult:
        for planned in self.plan.stage(self.stage):
            if planned.node.role == "input":
                self._run_input(planned)
            elif planned.node.id not in self.streamed:
                with self._telling_step():
                    self._run(planned)
        if self.dead:
            self._stage_dead_letters()
        leaving = self._leave()
        return StageResult(self.report, leaving)

    # Operators.

    def _run(self, planned: Planned) -> None:
        node = planned.node
        inputs = [self._input(planned, place) for place in range(len(node.inputs))]
        if node.role == "output":
            self._output(planned, inputs[0])
        elif node.role == "union":
            self.frames[node.id] = _union(inputs, planned.ordered)
        elif node.stateless is not None:
            self.frames[node.id] = self._apply(planned, inputs[0])
        elif node.stateful is not None and planned.region is not None:
            if any(not frame.is_empty() for frame in inputs):
                scoped = self.state.scoped(node.id, planned.region)
                context = self._context(planned)
                frame = node.stateful.process(inputs, scoped, context)
                self.frames[node.id] = _with_order(frame, planned.origin) if planned.ordered else frame
                self.dead.extend(context.dead_letters)
            else:
                self.frames[node.id] = _empty(planned)

    def _apply(self, planned: Planned, frame: pl.DataFrame) -> pl.DataFrame:
        assert planned.node.stateless is not None
        context = self._context(planned)
        frame = planned.node.stateless.apply(frame, context)
        self.dead.extend(context.dead_letters)
        return frame

    def _context(self, planned: Planned) -> Context:
        return Context(
            operator=planned.node.id,
            step=self.spec.step,
            on_error=planned.node.on_error,
            emit_order=planned.ordered,
            origin=planned.origin,
            guard=self.guard,
        )

    @contextmanager
    def _telling_step(self) -> Iterator[None]:
        try:
            yield
        except RecordError as error:
            raise RecordError(f"{error.where}, step {self.spec.step}", error.reason, error.record) from error

    def _run_input(self, planned: Planned) -> None:
        """Read an input and run the row by row operators behind it, a batch at a time (see `streaming.py`)."""
        stream = streaming.behind(planned, self.plan)
        self.streamed.update((planned.node.id, *(one.node.id for one in stream.operators)))
        kept: dict[OperatorId, list[pl.DataFrame]] = {operator: [] for operator in stream.whole}
        partials: dict[int, list[pl.DataFrame]] = {channel.number: [] for channel, _ in stream.aggregates}
        batches = streaming.Batches(stream, self._read(planned), _empty(planned))
        for batch in batches:
            frames = {planned.node.id: batch}
            for one in stream.operators:
                with self._telling_step():
                    frames[one.node.id] = self._apply(one, frames[one.node.inputs[0].id])
            for operator, pieces in kept.items():
                pieces.append(frames[operator])
            for channel, operator in stream.aggregates:
                if not frames[operator].is_empty():
                    known = streaming.known_keys(stream.flow, channel.number)
                    partial = self._combiner(channel).partial(frames[operator], known)
                    partials[channel.number].append(partial)
                    batches.learn(channel, batch, partial)
        for operator, pieces in kept.items():
            self.frames[operator] = streaming.together(pieces)
        for channel, _ in stream.aggregates:
            pieces = partials[channel.number]
            if len(pieces) > 1:
                known = streaming.known_keys(stream.flow, channel.number)
                pieces = [self._combiner(channel).combine(pieces, known)]
            if pieces:
                self.partials[channel.number] = pieces[0]

    def _input(self, planned: Planned, place: int) -> pl.DataFrame:
        """The rows for one input of an operator; sorted by hash where the operator keeps state."""
        feed = planned.feeds[place]
        stateful = planned.node.stateful
        if isinstance(feed, int):
            channel = self.channels[feed]
            frame = self._unpack(channel)
            return frame.sort(HASH) if stateful is not None and channel.kind == "forward" else frame
        frame = self.frames[feed]
        if stateful is not None:
            # Only an aggregate right behind its distributor gets partials from the senders.
            if isinstance(stateful, Combining):
                frame = _with_hash(stateful.partial(frame), planned.node.inputs[place].keys)
            elif HASH not in frame.columns:
                frame = _with_hash(frame, planned.node.inputs[place].keys)
            return frame.sort(HASH)
        return frame

    def _unpack(self, channel: Channel) -> pl.DataFrame:
        frame = self.unpacked.get(channel.number)
        if frame is None:
            packed = [p.frame() for p in self.arrived.get(channel.number, ()) if p.rows]
            if packed:
                frame = packed[0] if len(packed) == 1 else pl.concat(packed)
                if channel.kind == "exchange":
                    frame = frame.sort(HASH)
            else:
                frame = self._empty_channel(channel)
            self.unpacked[channel.number] = frame
        return frame

    def _empty_channel(self, channel: Channel) -> pl.DataFrame:
        frame = _empty(self.plan.operator(channel.producer), with_hash=channel.kind == "exchange")
        if channel.combine is not None:
            frame = _with_hash(self._combiner(channel).partial(frame), channel.keys)
        return frame

    def _combiner(self, channel: Channel) -> Combining:
        assert channel.combine is not None
        kernel = self.plan.operator(channel.combine).node.stateful
        assert isinstance(kernel, Combining)
        return kernel

    # Inputs and outputs.

    def _read(self, planned: Planned) -> Iterator[pl.DataFrame]:
        rows = self.report.input_rows
        rows[planned.node.id] = 0
        for assigned in self.spec.work[self.worker]:
            if assigned.input == planned.node.id:
                for frame in self._read_slice(planned, assigned):
                    rows[planned.node.id] += frame.height
                    yield frame

    def _read_slice(self, planned: Planned, assigned: Assigned) -> list[pl.DataFrame]:
        """The rows of a piece; as one dead letter, none of them, where it cannot be read and the flow says so."""
        node = planned.node
        pieces = [assigned.piece]
        if self.spec.lost:
            mine = (one for one in self.spec.lost if one.input == node.id)
            pieces, lost = without_lost(assigned.piece, mine)
            for one in lost:
                self._lose(planned, one)
        frames: list[pl.DataFrame] = []
        letters = len(self.dead)
        try:
            for piece in pieces:
                frames += self._read_piece(planned, piece)
        except (InputChangedError, Poisoned) as error:
            piece = assigned.piece
            gone = Lost(node.id, piece.partition, piece.start, piece.end, str(error))
            if node.on_error == "stop" or self.spec.replay:
                place = f"input {node.id!r}, step {self.spec.step}"
                if isinstance(error, Poisoned):
                    raise RecordError(place, str(error), gone.record) from error
                raise InputChangedError(f"{place}: {error}") from error
            # A file that vanished, changed or cannot be read: what was to be read of it is one dead letter.
            del self.dead[letters:]
            self._lose(planned, gone)
            frames = []
        self.report.reads.append(
            {
                "input": node.id,
                "partition": assigned.piece.partition,
                "ordinal": assigned.ordinal,
                "rows": sum(frame.height for frame in frames),
                "hash": sum(map(content_hash, frames)) % (1 << 64),
            }
        )
        return _placed(frames, planned.origin, assigned.ordinal) if planned.ordered else frames

    def _read_piece(self, planned: Planned, piece: Slice) -> list[pl.DataFrame]:
        node = planned.node
        assert node.source is not None
        if self.guard is not None:
            reason = self.guard.admit(node.id, f"{piece.partition} from {piece.start} to {piece.end}")
            if reason is not None:
                raise Poisoned(reason)
        frames = list(node.source.read(piece, self._on_bad(planned)))
        if self.guard is not None:
            self.guard.leave()
        return frames

    def _lose(self, planned: Planned, lost: Lost) -> None:
        self.report.lost.append(lost.to_json())
        where = f"partition {lost.partition}"
        self.dead.append(DeadLetter(planned.node.id, where, lost.record, lost.reason))

    def _on_bad(self, planned: Planned) -> OnBad:
        node = planned.node

        def on_bad(where: str, record: str, reason: str) -> None:
            place = f"input {node.id!r}, step {self.spec.step}, {where}"
            if node.on_error == "stop":
                raise RecordError(place, reason, record)
            self.dead.append(DeadLetter(node.id, where, record, reason))

        return on_bad

    def _output(self, planned: Planned, frame: pl.DataFrame) -> None:
        assert planned.node.sink is not None
        if frame.is_empty():
            return
        frame = frame.select(*planned.node.schema, WEIGHT).filter(pl.col(WEIGHT) != 0)
        self._stage_output(planned.node.name, planned.node.sink, frame)

    def _stage_dead_letters(self) -> None:
        letters = self.dead
        frame = pl.DataFrame(
            {name: [getattr(letter, name) for letter in letters] for name in DEAD_LETTER_SCHEMA}
            | {WEIGHT: [letter.weight for letter in letters]},
            schema={**DEAD_LETTER_SCHEMA, WEIGHT: pl.Int64()},
        )
        self.report.dead_letters = len(letters)
        self._stage_output(DEAD_LETTERS, parquet(), frame)

    def _stage_output(self, name: str, sink: Sink, frame: pl.DataFrame) -> None:
        if frame.is_empty():
            return
        spec = self.spec
        began = time.perf_counter()
        digest = zset_hash(frame)
        if spec.replay:
            self.report.outputs.setdefault(name, []).append({"rows": frame.height, "hash": digest})
            return
        frame = frame.with_columns(pl.lit(spec.step, pl.Int64).alias(STEP))
        file = f"step-{spec.step:012d}-stage-{self.stage:02d}-worker-{self.worker:04d}-try-{spec.epoch}.{spec.attempt}"
        staged = sink.stage(frame, open_storage(spec.outputs_root).child(name), file)
        self.report.outputs.setdefault(name, []).append({**staged.to_json(), "hash": digest})
        spent = self.report.seconds
        spent["output"] = spent.get("output", 0.0) + time.perf_counter() - began

    # The exchange.

    def _leave(self) -> list[list[Packed]]:
        leaving: list[list[Packed]] = [[] for _ in range(self.spec.workers)]
        if self.stage == self.plan.depth:
            return leaving
        for channel in self.plan.channels:
            if channel.start < self.stage < channel.end:
                leaving[self.worker].extend(self.arrived.get(channel.number, ()))
        for channel in self.plan.leaving(self.stage):
            self._send(channel, leaving)
        return leaving

    def _send(self, channel: Channel, leaving: list[list[Packed]]) -> None:
        producer = self.plan.operator(channel.producer)
        if channel.kind == "forward":
            frame = self.frames[channel.producer]
            if not frame.is_empty():
                leaving[self.worker].append(pack_frame(channel.number, frame))
            return
        feed = producer.feeds[0]
        assert not isinstance(feed, int)
        if channel.combine is None:
            frame = self.frames[feed]
        elif feed in self.streamed:
            frame = self.partials.get(channel.number, _NOTHING)
        else:
            frame = self.frames[feed]
            frame = frame if frame.is_empty() else self._combiner(channel).partial(frame)
        if frame.is_empty():
            return
        frame = _with_hash(frame, channel.keys)
        receivers = _receivers(self.spec, frame.get_column(HASH).to_numpy())
        for receiver, part in _partition(frame, receivers, self.spec.workers):
            leaving[receiver].append(pack_frame(channel.number, part))


def _receivers(spec: StepSpec, hashes: U64) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """The worker of each hash; of a shard under way, that of the copy on its side of the cursor."""
    owners = np.asarray(spec.layout.shards, dtype=np.uint16)
    shards = shard_of(hashes, len(owners))
    receivers = owners[shards]
    for shard, cut in spec.cuts.items():
        receivers[(shards == shard) & (hashes < np.uint64(cut.cursor))] = cut.arriving
    return receivers


def _partition(
    frame: pl.DataFrame, receivers: np.ndarray[tuple[int], np.dtype[np.uint16]], workers: int
) -> Iterator[tuple[int, pl.DataFrame]]:
    """Cut a frame by receiver, keeping the order of rows."""
    if workers == 1:
        yield 0, frame
        return
    counts = np.bincount(receivers, minlength=workers)
    # A stable sort of 16-bit numbers is a radix sort in NumPy: linear in the rows.
    frame = frame[np.argsort(receivers, kind="stable")]
    start = 0
    for receiver, count in enumerate(counts.tolist()):
        if count:
            yield receiver, frame.slice(start, count)
            start += count


def _placed(frames: list[pl.DataFrame], origin: int, ordinal: int) -> list[pl.DataFrame]:
    """Give the rows of one piece of input their canonical order."""
    placed = []
    place = 0
    for frame in frames:
        placed.append(
            frame.with_columns(
                pl.lit(origin, ORDER_SCHEMA[ORIGIN]).alias(ORIGIN),
                pl.lit(ordinal, ORDER_SCHEMA[MAJOR]).alias(MAJOR),
                pl.int_range(place, place + frame.height, dtype=pl.Int64).alias(MINOR),
            )
        )
        place += frame.height
    return placed


def _with_hash(frame: pl.DataFrame, keys: tuple[str, ...]) -> pl.DataFrame:
    return frame.with_columns(pl.Series(HASH, hash_columns(frame, keys), dtype=pl.UInt64))


def _with_order(frame: pl.DataFrame, origin: int) -> pl.DataFrame:
    """Give the rows of a region their canonical order, unless the kernel has: by key, then by content."""
    if all(column in frame.columns for column in ORDER):
        return frame
    frame = frame.sort([HASH, *visible(frame), WEIGHT])
    return frame.with_columns(
        pl.lit(origin, ORDER_SCHEMA[ORIGIN]).alias(ORIGIN),
        pl.col(HASH).alias(MAJOR),
        pl.int_range(pl.len(), dtype=pl.Int64).over(HASH).alias(MINOR),
    )


def _union(frames: list[pl.DataFrame], ordered: bool) -> pl.DataFrame:
    """Rows of all inputs; where order counts, rows of equal place are told apart by their input's number."""
    columns = [*visible(frames[0]), WEIGHT, *(ORDER if ordered else ())]
    parts = []
    for place, frame in enumerate(frames):
        part = frame.select(columns)
        if ordered:
            part = part.with_columns(pl.col(MINOR) * len(frames) + place)
        parts.append(part)
    return pl.concat(parts)


def _empty(planned: Planned, *, with_hash: bool | None = None) -> pl.DataFrame:
    """No rows, with the columns that the operator's rows have."""
    schema: dict[str, pl.DataType] = dict(frame_schema(planned.node.schema))
    if with_hash if with_hash is not None else planned.node.keys:
        schema[HASH] = pl.UInt64()
    if planned.ordered:
        schema.update(ORDER_SCHEMA)
    return pl.DataFrame(schema=schema)
