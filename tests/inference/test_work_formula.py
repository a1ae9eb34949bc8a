"""Operations and bytes of a step, worked out by hand, and a run's report against given peaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.engine import Engine
from inference.kernels.base import Compute
from inference.memory.ring import StreamStats
from inference.model.config import DecoderConfig, Experts
from inference.planner import measured as measured_module
from inference.planner import peaks as peaks_module
from inference.planner.cost import StepCost
from inference.planner.layer_rates import AttentionSeconds, LayerRates
from inference.planner.meter import STEPS_KEPT, StepMeter, StepWork
from inference.planner.peaks import AttentionRate, HostPeaks, MatrixRate, ReadRate
from inference.planner.work import StepShape, WorkFormula, model_matrices
from inference.request import SamplingParams

# 2 layers, H 8, I 16, 4 query and 2 key-value heads of 2: q-k-v 8 x 16, o 8 x 8, gate-up 8 x 32, down 16 x 8.
CONFIG = DecoderConfig("llama", 100, 8, 16, 2, 4, 2, 2, 512, 10_000.0, 1e-5, True)
LAYER_WEIGHTS = 2 * (8 * 16 + 8 * 8 + 8 * 32 + 16 * 8)


def formula(config: DecoderConfig = CONFIG) -> WorkFormula:
    return WorkFormula.of(config, layer_bytes=1000, head_bytes=500, token_cache_bytes=32.0)


def test_a_prefill_of_three_and_a_decoding_row_at_ten() -> None:
    shape = formula().shape([(3, 3), (1, 10)], 2)
    # Pairs: 1 + 2 + 3 and 10, in 2 layers; the contexts of 3 and 10 tokens are read in 2 layers.
    assert shape == StepShape(rows=4, logit_rows=2, pairs=32, context_tokens=26)
    assert formula().matrix_operations(shape) == 2 * (LAYER_WEIGHTS * 4 + 8 * 100 * 2)
    # Scores and weighted values: 2 operations an element each, 4 heads of 2.
    assert formula().attention_operations(shape) == 32 * 4 * 2 * 4
    # 16 bytes a token and layer: 26 read, 4 x 2 written.
    assert formula().bytes(shape) == 1000 + 500 + 16 * (26 + 8)


def test_the_head_is_not_read_where_no_logits_are_wanted() -> None:
    assert formula().weight_bytes(formula().shape([(3, 3)], 0)) == 1000


def test_a_window_bounds_what_a_row_sees() -> None:
    # Rows 4 to 6 (counted from 1) with a window of 4 see 4, 4 and 4 tokens; of the first three rows 1, 2, 3.
    assert StepShape.of([(3, 6)], 0, [(4, 1)]) == StepShape(3, 0, 12, 6)
    assert StepShape.of([(6, 6)], 0, [(4, 1)]) == StepShape(6, 0, 1 + 2 + 3 + 4 + 4 + 4, 6)
    assert StepShape.of([(1, 100)], 0, [(4, 1)]) == StepShape(1, 0, 4, 4)


@pytest.mark.parametrize("count", [1, 2, 5, 9])
@pytest.mark.parametrize("length", [9, 12, 40])
@pytest.mark.parametrize("window", [0, 1, 4, 11, 64])
def test_pairs_are_the_sum_over_rows(count: int, length: int, window: int) -> None:
    seen = [position + 1 for position in range(length - count, length)]
    expected = sum(min(tokens, window) if window else tokens for tokens in seen)
    assert StepShape.of([(count, length)], 0, [(window, 1)]).pairs == expected


def test_a_mixture_counts_the_experts_used_and_reads_no_more_than_its_rows_choose() -> None:
    from dataclasses import replace

    mixture = replace(CONFIG, layers=1, experts=Experts(count=8, used=2, size=4))
    attention, expert = 8 * 16 + 8 * 8, 3 * 8 * 4
    work = WorkFormula.of(mixture, layer_bytes=attention + 8 * expert, head_bytes=0, token_cache_bytes=0.0)
    assert work.layer_weights == attention + 2 * expert
    assert work.weight_bytes(work.shape([(1, 1)], 0)) == pytest.approx(attention + 2 * expert)
    assert work.weight_bytes(work.shape([(3, 3)], 0)) == pytest.approx(attention + 6 * expert)
    assert work.weight_bytes(work.shape([(50, 50)], 0)) == pytest.approx(attention + 8 * expert)


def given_peaks() -> HostPeaks:
    matrix = [MatrixRate(rows, m.inputs, m.outputs, 1e6) for m in model_matrices(CONFIG) for rows in (1, 64)]
    large = MatrixRate(64, 4096, 4096, 2e6)
    read = (ReadRate(2000, 1e4), ReadRate(10_000, 1e3))
    return HostPeaks(
        "a processor", 1, "int8", "native", "", read, (*matrix, large), 1.5e6, AttentionRate(1e4, 1e5, 1e5)
    )


def test_a_working_set_has_the_rate_of_the_smallest_buffer_that_holds_it() -> None:
    peaks = given_peaks()
    assert [peaks.bytes_per_s_of(size) for size in (1, 2000, 2001, 10**9)] == [1e4, 1e4, 1e3, 1e3]
    assert (peaks.bytes_per_s, peaks.operations_per_s) == (1e3, 2e6)
    assert HostPeaks.from_dict(peaks.as_dict()) == peaks


def test_a_report_sets_each_step_against_its_own_limit() -> None:
    work, meter = formula(), StepMeter()
    decode = work.shape([(1, 10)], 1)  # 1500 + 16 * (20 + 2) = 1852 bytes: 0.1852 s; 4752 operations: 2.4 ms
    assert work.bytes(decode) == 1852 and work.operations(decode) == 2 * (1152 + 800) + 20 * 32
    # 1000 rows: 2 * 1152000 + 1600 + 500500 * 2 * 32 operations, 17 s; 65500 bytes from memory, 65.5 s.
    prefill = work.shape([(1000, 1000)], 1)
    assert work.bytes(prefill) == 1500 + 16 * (2000 + 2000)
    meter.record(100.0, 200.0, 100.0, prefill, sequences=1, prefill_rows=1000, decode_context=0, streamed=StreamStats())
    meter.record(210.0, 210.5, 0.5, decode, sequences=3, prefill_rows=0, decode_context=10, streamed=StreamStats())
    report = meter.report(work, given_peaks(), model_matrices(CONFIG))
    assert (report.steps, report.steps_left_out) == (2, 0)
    assert report.wall_seconds == pytest.approx(110.5) and report.busy_seconds == pytest.approx(100.5)
    assert (report.prefill_tokens, report.decode_tokens) == (1000, 1)
    assert report.prefill_tokens_per_s == pytest.approx(10.0) and report.decode_tokens_per_s == pytest.approx(2.0)
    assert report.roofline_seconds == pytest.approx(65.5 + 0.1852)
    assert report.fraction_of_limit == pytest.approx(65.6852 / 100.5)
    # The layers' products at 1e6 (the own rate), attention at 1e5 operations or 1e4 bytes a second.
    prefill_own = 2 * (1152 * 1000 + 800) / 1e6 + 2 * 500_500 * 32 / 1e5
    decode_own = max(1852 / 1e4, 2 * (1152 + 800) / 1e6 + 352 / 1e4)
    assert report.own_kernels_seconds == pytest.approx(prefill_own + decode_own)
    assert report.memory_share == pytest.approx(65.6852 / 110.5)
    assert report.arithmetic_share == 0
    assert report.overhead_share == pytest.approx((100.5 - 65.6852) / 110.5)
    assert report.idle_share == pytest.approx(10 / 110.5)
    assert report.bound_by == "memory"
    assert report.batch_size_over_time == ((0.0, 1.0), (110.0, 3.0))
    assert report.bytes == 65_500 + 1852
    done = meter.work(work)
    assert done == StepWork((work.operations(prefill), work.operations(decode)), (0, 0))
    assert report.predicted_seconds is None
    # A layer: 2 s and half a second a row; by decoding row 0.25 s, by token looked back to 0.125 s, by pair of a
    # prompt 0.001 s. The head: 3 s and 1 s a row; making ready: 1 s and 1 s a sequence. CONFIG has two layers.
    rates = LayerRates(
        rows=(1, 1001),
        layer=(2.5, 502.5),
        apart=9.0,
        head=(4.0, 1004.0),
        batch=(2.0, 1002.0),
        stream_bytes_per_s=None,
        read_cost=0.0,
        attention={"int8": AttentionSeconds(decode_row=0.25, decode_token=0.125, prompt_pair=0.001)},
    )
    cost = StepCost(rates, "int8", CONFIG.layers, 0, 0, 1.0, 1.0)
    predicted = meter.report(work, None, model_matrices(CONFIG), cost=cost)
    prompt_seconds = 2 * (502 + 500_500 * 0.001) + 4 + 2
    # Three sequences and one row: the pieces of prompts among them are the other two.
    decode_seconds = 2 * (2.5 + 0.25 + 10 * 0.125) + 4 + 4
    assert predicted.predicted_prefill_seconds == pytest.approx(prompt_seconds)
    assert predicted.predicted_seconds == pytest.approx(prompt_seconds + decode_seconds)
    only_the_last = meter.report(work, None, model_matrices(CONFIG), since=1)
    assert (only_the_last.steps, only_the_last.fraction_of_limit) == (1, None)
    assert "have not been measured" in only_the_last.line()


def test_an_engine_that_ran_nothing_reports_nothing() -> None:
    report = StepMeter().report(formula(), given_peaks(), model_matrices(CONFIG))
    assert (report.steps, report.wall_seconds, report.bound_by) == (0, 0.0, "not known")
    assert report.line()


def test_a_long_run_keeps_its_last_steps_in_the_same_memory() -> None:
    work, meter = formula(), StepMeter()
    shape = work.shape([(1, 1)], 1)
    for step in range(STEPS_KEPT + 5):
        meter.record(
            float(step), step + 1.0, 1.0, shape, sequences=1, prefill_rows=0, decode_context=1, streamed=StreamStats()
        )
    report = meter.report(work, None, model_matrices(CONFIG))
    assert (report.steps, report.steps_left_out) == (STEPS_KEPT, 5)
    assert report.idle_share == pytest.approx(0.0)


def test_peaks_are_measured_once_and_kept(tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_module, "measured_folder", lambda: tmp_path)
    monkeypatch.setattr(peaks_module, "SECONDS_A_RATE", 0.0)
    monkeypatch.setattr(peaks_module, "WORKING_SETS", (2**20, 2**21))
    monkeypatch.setattr(peaks_module, "LARGE", 256)
    monkeypatch.setattr(peaks_module, "LIBRARY_ROWS", 8)
    first = Engine.load(tiny_store, threads=1, max_batch=2, memory_bytes=2**30)
    assert first.peaks(measure=False) is None
    measured = first.peaks()
    assert measured is not None and measured.bytes_per_s > 0 and measured.operations_per_s > 0
    second = Engine.load(tiny_store, threads=1, max_batch=2, memory_bytes=2**30)
    assert second.peaks(measure=False) == measured
    (kept,) = (tmp_path / "peaks").iterdir()
    kept.write_text("{")
    third = Engine.load(tiny_store, threads=1, max_batch=2, memory_bytes=2**30)
    assert third.peaks(measure=False) is None  # a damaged file is measured over, and not believed
    assert third.peaks() is not None


def test_the_engines_report_counts_its_own_rows(engine: Engine) -> None:
    since = engine.stats().steps
    engine.generate([[5, 6, 7, 8], [9, 10]], SamplingParams(max_tokens=3, ignore_eos=True))
    report = engine.report(since=since)
    assert (report.steps, report.prefill_tokens, report.decode_tokens) == (3, 6, 4)
    config = engine.manifest.config
    # Two requests of 4 + 2 and 2 + 2 computed tokens, 3 rows of logits each.
    weights = sum(m.inputs * m.outputs * m.times for m in model_matrices(config))
    head = config.vocab_size * config.hidden_size
    pairs = (1 + 2 + 3 + 4 + 5 + 6) + (1 + 2 + 3 + 4)
    expected = 2 * (10 * weights + 6 * head) + 4 * config.query_size * config.layers * pairs
    assert report.operations == expected == engine.operations(4, 3) + engine.operations(2, 3)


@pytest.mark.parametrize("compute", ["fp32", "bf16", "int8"])
def test_a_model_with_code_of_its_own_is_set_against_the_peaks_too(
    compute: Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.setattr(measured_module, "measured_folder", lambda: tmp_path)
    monkeypatch.setattr(peaks_module, "SECONDS_A_RATE", 0.0)
    monkeypatch.setattr(peaks_module, "WORKING_SETS", (2**20, 2**21))
    monkeypatch.setattr(peaks_module, "LARGE", 256)
    monkeypatch.setattr(peaks_module, "LIBRARY_ROWS", 8)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    model.save_pretrained(tmp_path / "model")
    engine = Engine.load(tmp_path / "model", threads=1, compute=compute, max_batch=2, memory_bytes=2**28)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert engine.peaks() is not None
    report = engine.report()
    assert (report.prefill_tokens, report.decode_tokens) == (3, 2)
    assert report.fraction_of_limit is not None and report.fraction_of_limit > 0
