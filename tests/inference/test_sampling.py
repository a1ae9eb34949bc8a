"""From logits to tokens: each step against transformers' own, scipy or numpy, and each row alone."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inference.group import new_group
from inference.parameters import SamplingParams
from inference.request import GenerationRequest
from inference.sampling import Chosen, choose_tokens, kept_mass, seed_of_sample
from inference.sequence import Sequence

VOCABULARY = 1000


def sequence_of(prompt: list[int], output: list[int], sampling: SamplingParams, index: int = 0) -> Sequence:
    request = GenerationRequest("r", tuple(prompt), sampling)
    group = new_group(request, itertools.count(), sampling.max_tokens, None, None, None, lambda completion: None)
    sequence = group.sequences[index]
    sequence.tokens += output
    return sequence


def random_logits(seed: int, rows: int = 1, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def choose(logits: torch.Tensor, sequence: Sequence) -> Chosen:
    return choose_tokens(logits[None].clone(), None, [sequence])[0]


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.0, "top_k": VOCABULARY + 1},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 2.0, "top_p": 0.999},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 1.3, "top_k": 300, "top_p": 0.97, "min_p": 0.001},
    ],
)
def test_what_is_cut_off_is_what_transformers_cuts_off(values: dict[str, Any]) -> None:
    steps = LogitsProcessorList([TemperatureLogitsWarper(float(values["temperature"]))])
    if "min_p" in values:
        steps.append(MinPLogitsWarper(min_p=values["min_p"]))
    if "top_k" in values:
        steps.append(TopKLogitsWarper(values["top_k"]))
    if "top_p" in values:
        steps.append(TopPLogitsWarper(values["top_p"]))
    for seed in range(20):
        logits = random_logits(seed)
        expected = torch.softmax(steps(torch.zeros(1, 1, dtype=torch.int64), logits.double()), dim=1)[0]
        mass, tokens = kept_mass(logits[0].numpy(), SamplingParams(**values))
        got = torch.zeros(VOCABULARY, dtype=torch.float64)
        got[torch.arange(VOCABULARY) if tokens is None else torch.from_numpy(tokens)] = torch.from_numpy(
            mass / mass.sum()
        )
        assert set(got.nonzero().flatten().tolist()) == set(expected.nonzero().flatten().tolist())
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_draws_follow_the_distribution() -> None:
    logits = random_logits(5, vocabulary=40)[0]
    sampling = SamplingParams(temperature=1.4, top_k=12, seed=99)
    sequence = sequence_of([1], [], sampling)
    count = 6000
    drawn = Counter(choose(logits, sequence).token for _ in range(count))
    probabilities = scipy.special.softmax(logits.double().numpy() / 1.4)
    kept = np.argsort(-probabilities)[:12]
    expected = probabilities[kept] / probabilities[kept].sum() * count
    assert set(drawn) <= set(kept.tolist())
    assert scipy.stats.chisquare([drawn[int(token)] for token in kept], expected).pvalue > 0.01


def test_a_seed_repeats_its_draws_and_each_sample_has_its_own() -> None:
    logits = random_logits(6)[0]
    sampling = SamplingParams(temperature=2.0, seed=7, n=4)

    def draws(index: int) -> list[int | None]:
        sequence = sequence_of([1], [], sampling, index)
        return [choose(logits, sequence).token for _ in range(12)]

    first = [draws(index) for index in range(4)]
    assert first == [draws(index) for index in range(4)]
    assert len({tuple(tokens) for tokens in first}) == 4
    assert seed_of_sample(7, 0) == 7
    assert len({seed_of_sample(seed, index) for seed in range(20) for index in range(20)}) == 400
    # The first sample of n is what a request for one gets.
    alone = sequence_of([1], [], SamplingParams(temperature=2.0, seed=7))
    assert [choose(logits, alone).token for _ in range(12)] == first[0]


def test_repetition_penalty_is_that_of_transformers_over_prompt_and_output() -> None:
    prompt, output = [3, 5, 5, 900], [17, 3, 999]
    for seed, penalty in itertools.product(range(10), (0.5, 1.3, 5.0)):
        logits = random_logits(seed)
        logits[0, [3, 17, 900]] += 8
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
        chosen = choose(logits[0], sequence_of(prompt, output, SamplingParams(repetition_penalty=penalty)))
        assert chosen.token == int(expected.argmax())


def test_frequency_and_presence_count_the_output_alone() -> None:
    """OpenAI's formula: logit -= times * frequency_penalty + (times > 0) * presence_penalty."""
    logits = torch.zeros(VOCABULARY)
    logits[[10, 11, 12, 13]] = torch.tensor([5.0, 4.9, 4.0, 3.5])
    output = [10, 10, 11]
    for frequency, presence, expected in [
        (0.0, 0.0, 10),
        (0.5, 0.0, 11),  # 10: 4.0, 11: 4.4, 12: 4.01
        (0.0, 1.0, 12),  # 10: 4.0, 11: 3.9, 12: 4.01
        (2.0, 0.0, 12),  # 10: 1.0, 11: 2.9, 12: 4.01
        (-1.0, 0.0, 10),
    ]:
        sampling = SamplingParams(
            frequency_penalty=frequency, presence_penalty=presence, logit_bias=((12, 0.01), (5, 0.0))
        )
        assert choose(logits, sequence_of([12, 12, 12, 13], output, sampling)).token == expected


def test_logit_bias_bans_and_forces() -> None:
    logits = random_logits(1)[0]
    best, second = logits.topk(2).indices.tolist()
    assert choose(logits, sequence_of([1], [], SamplingParams(logit_bias=((best, -100.0),)))).token == second
    assert choose(logits, sequence_of([1], [], SamplingParams(logit_bias=((77, 100.0),)))).token == 77
    drawn = sequence_of([1], [], SamplingParams(temperature=1.0, seed=1, logit_bias=((77, 100.0),)))
    assert [choose(logits, drawn).token for _ in range(20)] == [77] * 20


def test_log_probabilities_are_of_the_models_own_distribution() -> None:
    logits = random_logits(2)[0]
    expected = scipy.special.log_softmax(logits.double().numpy())
    sampling = SamplingParams(
        temperature=1.7, seed=3, top_k=50, repetition_penalty=1.4, logit_bias=((4, 9.0),), logprobs=5
    )
    sequence = sequence_of([1, 2], [4, 4], sampling)
    for _ in range(10):
        chosen = choose(logits, sequence)
        assert chosen.token is not None and chosen.logprob is not None
        assert chosen.logprob.logprob == pytest.approx(expected[chosen.token], abs=1e-12)
        assert [token for token, _ in chosen.logprob.top] == np.argsort(-expected)[:5].tolist()
        assert [value for _, value in chosen.logprob.top] == pytest.approx(np.sort(expected)[::-1][:5], abs=1e-12)
    bare = choose(logits, sequence_of([1], [], SamplingParams(logprobs=0))).logprob
    assert bare is not None and bare.top == () and bare.logprob == pytest.approx(expected.max(), abs=1e-12)


SAMPLINGS = [
    SamplingParams(),
    SamplingParams(logprobs=3),
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=1.2, seed=2, top_p=0.7, logprobs=2),
    SamplingParams(temperature=1.2, seed=3, top_k=9, min_p=0.01),
    SamplingParams(repetition_penalty=1.8),
    SamplingParams(frequency_penalty=0.7, presence_penalty=-0.3, temperature=0.5, seed=4),
    SamplingParams(min_tokens=9, stop_token_ids=(3,)),
    SamplingParams(logit_bias=((1, 3.0),)),
]


def test_a_rows_choice_has_the_same_bits_alone_and_among_any_others() -> None:
    logits = random_logits(8, len(SAMPLINGS), 49152)
    scales = torch.rand(len(SAMPLINGS), generator=torch.Generator().manual_seed(1)) + 0.5

    def rows(order: list[int]) -> dict[int, Chosen]:
        sequences = [sequence_of([5, 6, 7], [8, 8, 9], SAMPLINGS[i]) for i in order]
        return dict(zip(order, choose_tokens(logits[order].clone(), scales[order], sequences), strict=True))

    alone = {i: rows([i])[i] for i in range(len(SAMPLINGS))}
    generator = np.random.default_rng(1)
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for _ in range(4):
                order = generator.permutation(len(SAMPLINGS)).tolist()
                assert rows(order) == alone
        finally:
            torch.set_num_threads(before)


def test_rows_of_nan_or_infinity_are_told_and_spoil_no_other() -> None:
    logits = random_logits(4, 5)
    fine = int(logits[0].argmax())
    logits[1, 5] = math.nan
    logits[2, 5] = math.inf
    logits[4] = 0.0
    scales = torch.tensor([1.0, 1.0, 1.0, 1.0, math.nan])  # as quantized rows of NaN have it
    samplings = [SamplingParams(), SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(logprobs=1)]
    sequences = [sequence_of([1], [], sampling) for sampling in [*samplings, SamplingParams()]]
    chosen = choose_tokens(logits, scales, sequences)
    assert [one.token is None for one in chosen] == [False, True, True, False, True]
    assert chosen[0].token == fine
    assert chosen[1].error is not None and "NaN or infinity" in chosen[1].error


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-100, 1e-6])
@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.9}, {"min_p": 1e-300}, {"top_k": 3}])
def test_a_temperature_next_to_nothing_takes_the_likeliest(temperature: float, cuts: dict[str, Any]) -> None:
    for seed in range(5):
        (logits,) = random_logits(seed)
        sampling = SamplingParams(temperature=temperature, seed=seed, **cuts)
        with np.errstate(all="raise", under="ignore"):
            assert choose(logits, sequence_of([1], [], sampling)).token == int(logits.argmax())


@pytest.mark.parametrize("penalty", [5e-324, 1e-45, 1e-38, 100.0])
def test_no_repetition_penalty_makes_nan(penalty: float) -> None:
    (logits,) = random_logits(1)
    logits[3], logits[4] = 2.0, -1e-40
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(repetition_penalty=penalty, temperature=temperature, seed=2, min_tokens=9)
        sequence = sequence_of([3, 4, 9], [], sampling)
        sequence.eos_token_ids = frozenset({9})
        with np.errstate(invalid="raise", divide="raise"):
            token = choose(logits, sequence).token
        assert token == 3 if penalty < 1 else token is not None and token != 9


@pytest.mark.parametrize("values", [{}, {"temperature": 1.0}, {"logprobs": 1}])
def test_where_all_tokens_are_banned_the_request_is_told_so(values: dict[str, Any]) -> None:
    (logits,) = random_logits(1, vocabulary=8)
    sampling = SamplingParams(min_tokens=2, stop_token_ids=tuple(range(8)), seed=1, **values)
    assert choose(logits, sequence_of([1], [], sampling)).error is not None
    assert "stop_token_ids" in str(choose(logits, sequence_of([1], [], sampling)).error)
    assert choose(logits, sequence_of([1], [3, 3], sampling)).token is not None
