"""JetStream's real orchestrator and gRPC server over our engine: the tokens of our own scheduler, refusals, the end."""

from __future__ import annotations

import dataclasses
import functools
import logging
import socket
import threading

import jax
import numpy as np
import pytest
import sampler_helpers as tiny

pytest.importorskip("jetstream", reason="google-jetstream is not installed: pip install -e .[jetstream]")
import grpc  # noqa: E402
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc  # noqa: E402

from rljax import tokenizer  # noqa: E402
from rljax.sample import SamplingParams  # noqa: E402
from rljax.sampler import jetstream  # noqa: E402
from rljax.sampler.engine import Engine  # noqa: E402
from rljax.sampler.scheduler import Request, Scheduler, complete  # noqa: E402

CHARACTERS = "".join(map(chr, [*range(32, 127), *range(0xC0, 0xC0 + tiny.KNOWN - 2 - 95)]))
SHAPE = dataclasses.replace(tiny.SHAPE, slots=4, steps_per_dispatch=1, members=1)
GREEDY = [tiny.request(uid, length, new, temperature=0.0) for uid, (length, new) in enumerate(
    [(5, 10), (1, 3), (8, 1), (9, 16), (16, 12), (17, 2), (2, 16), (31, 16), (12, 7), (32, 16), (3, 16), (24, 9)])]


@functools.cache
def engine():
    return Engine(tiny.CONFIG, SHAPE, tiny.one_device())


@functools.cache
def weights():
    return engine().weights(tiny.master())


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("characters")
    tokenizer.character_tokenizer(CHARACTERS, folder)
    return tokenizer.load(folder)


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


class Served:
    """A running server with its client."""

    def __init__(self, *args, **kwargs):
        self.port = free_port()
        self.server = jetstream.serve(engine(), weights(), *args, port=self.port, **kwargs)
        self.channel = grpc.secure_channel(f"localhost:{self.port}", grpc.local_channel_credentials())
        self.stub = jetstream_pb2_grpc.OrchestratorStub(self.channel)

    def start(self, content, max_tokens):
        """Send one request, with text or tokens: the stream of its responses."""
        if isinstance(content, str):
            content = {"text_content": jetstream_pb2.DecodeRequest.TextContent(text=content)}
        else:
            content = {"token_content": jetstream_pb2.DecodeRequest.TokenContent(token_ids=content)}
        return self.stub.Decode(jetstream_pb2.DecodeRequest(max_tokens=max_tokens, **content), timeout=60)

    def decode(self, content, max_tokens):
        return tokens(self.start(content, max_tokens))

    def stop(self):
        self.channel.close()
        self.server.stop()


def tokens(stream):
    """All tokens of a stream; each response has at most one."""
    responses = [list(response.stream_content.samples[0].token_ids) for response in stream]
    assert max(map(len, responses)) <= 1
    return sum(responses, [])


def text(stream):
    return "".join(response.stream_content.samples[0].text for response in stream)


@pytest.fixture(scope="module")
def served(characters):
    served = Served(characters)
    yield served
    served.stop()


def expected(requests):
    """What our scheduler draws, without the stop id that JetStream leaves out."""
    copies = [Request(r.uid, r.context, r.params) for r in requests]
    drawn = complete(Scheduler(engine()), weights(), copies)
    return [r.tokens[:-1] if r.end_reason == "stop" else r.tokens for r in drawn], [r.end_reason for r in drawn]


def test_concurrent_requests_get_the_tokens_of_our_scheduler(served):
    """Three times as many requests as slots at once, of 1 token to a full bucket, ended by stop ids or max_tokens."""
    wanted, reasons = expected(GREEDY)
    assert {"stop", "length"} == set(reasons)
    assert served.stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
    streams = [served.start(r.context, r.params.max_new_tokens) for r in GREEDY]
    assert [tokens(stream) for stream in streams] == wanted


def test_text_goes_in_and_out(served, characters):
    requests = [r for r in GREEDY if max(r.context) < tiny.KNOWN]
    wanted, _ = expected(requests)
    streams = [served.start(characters.decode(r.context), r.params.max_new_tokens) for r in requests]
    assert [text(stream) for stream in streams] == [characters.decode(ids) for ids in wanted]


def test_samples_of_one_prompt_have_the_seeds_of_their_order(characters):
    """uid = order of arrival: sixteen concurrent samples are those of uids 0 to 15, some order among themselves."""
    draws = SamplingParams(max_new_tokens=6, temperature=1.5, top_k=20)
    requests = [Request(uid, GREEDY[0].context, draws) for uid in range(16)]
    wanted, _ = expected(requests)
    assert len(set(map(tuple, wanted))) > 10
    served = Served(characters, draws=draws)
    try:
        streams = [served.start(r.context, 100) for r in requests]  # draws.max_new_tokens ends them
        assert sorted(map(tokens, streams)) == sorted(wanted)
    finally:
        served.stop()


def test_stop_ids_end_a_request_after_the_least_tokens(characters):
    draws = SamplingParams(max_new_tokens=40, min_new_tokens=3, temperature=1.5)
    requests = [Request(uid, GREEDY[0].context, draws) for uid in range(16)]
    wanted, reasons = expected(requests)
    assert "stop" in reasons and min(map(len, wanted)) >= 3
    served = Served(characters, draws=draws)
    try:
        assert sorted(tokens(served.start(r.context, 40)) for r in requests) == sorted(wanted)
    finally:
        served.stop()


def test_a_full_cache_ends_a_request(served):
    long = [tiny.request(uid, 31, SHAPE.cache_len - 31, temperature=0.0) for uid in range(20, 28)]
    wanted, reasons = expected(long)
    assert "length" in reasons
    assert [tokens(s) for s in [served.start(r.context, 1000) for r in long]] == wanted


@pytest.mark.parametrize("content, why", [
    (list(range(8, 41)), "a context of 33 tokens is longer than the largest prompt bucket, 32"),
    ([9] * 70, "a context of 71 tokens; JetStream cuts it to 64"),
    ([9, tiny.VOCAB], f"token {tiny.VOCAB} is none of the model's {tiny.VOCAB}"),
    ([-1, -1], "token -1 is none"), ([], "a context of 0 tokens"), ("", "a context of 0 tokens"),
    ("a\nb", "no id for '\\n'"),
])
def test_a_request_that_cannot_be_decoded_ends_and_the_others_go_on(served, caplog, content, why):
    wanted, _ = expected(GREEDY[3:7])
    with caplog.at_level(logging.WARNING, logger="rljax"):
        refused = [served.start(content, 5) for _ in range(3)]
        streams = [served.start(r.context, r.params.max_new_tokens) for r in GREEDY[3:7]]
        assert [tokens(stream) for stream in refused] == [[], [], []]
        assert [tokens(stream) for stream in streams] == wanted
    assert caplog.text.count(why) == 3


def test_a_prefix_moves_between_engines(characters):
    """The calls of a driver whose prefill engine is another: the prefix is placed anew, and freed once inserted."""
    adapter = jetstream.JetStreamEngine(engine(), weights(), characters)
    assert SHAPE.slots < adapter.max_concurrent_decodes == SHAPE.slots  # asserted by the driver when none is in use
    prompt = np.asarray([*GREEDY[3].context, 0, 0, 0])
    prefix = adapter.prefill(params=adapter.load_params(), padded_tokens=prompt, true_length=len(prompt) - 3)
    prefix = jax.device_put(prefix, adapter.get_prefix_destination_sharding())
    state = adapter.insert(prefix, adapter.init_decode_state(), slot=2)
    jetstream.orchestrator.delete_pytree(prefix)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(prefix)) and jax.tree.leaves(prefix)
    drawn = []
    for length in range(1, 4):
        state, result = adapter.generate(weights(), state)
        slot, idle = (result.convert_to_numpy().get_result_at_slot(index) for index in (2, 1))
        assert slot.valid.tolist() == [[1]] and slot.lengths.tolist() == [length] and idle.valid.tolist() == [[0]]
        drawn += slot.tokens[0].tolist()
    wanted = complete(Scheduler(engine()), weights(), [Request(0, GREEDY[3].context, GREEDY[3].params)])[0].tokens
    assert drawn == wanted[:3]


def test_a_token_keeps_its_space_and_a_byte_stays_a_byte():
    """Decoders of the llama kind strip the first space of a text, and join bytes to characters."""
    pieces = {0: "\u2581two", 1: "words", 2: "<0xC3>", 3: "<0xA9>"}

    class Llama:
        hf = type("", (), {"convert_ids_to_tokens": staticmethod(pieces.get)})

        def decode(self, ids):
            return "".join(pieces[i] for i in ids).replace("\u2581", " ").removeprefix(" ")

    ours = jetstream.JetStreamTokenizer(Llama(), ())
    streamed = [ours.decode([token]) for token in (1, 0, 2, 3)]
    assert streamed == ["words", " two", "<0xC3>", "<0xA9>"]
    assert jetstream.token_utils.text_tokens_to_str(streamed) == "words two\u00e9"


@pytest.mark.parametrize("change, draws, why", [
    ({"steps_per_dispatch": 4}, jetstream.GREEDY, "steps_per_dispatch is 4"),
    ({}, SamplingParams(5, stop=("a",)), "stop strings"), ({}, SamplingParams(5, top_p=0.0), "top_p 0.0"),
    ({"prefill_chunk": 16}, jetstream.GREEDY, "prompts of 32 tokens would go in parts of prefill_chunk 16"),
])
def test_what_cannot_be_served_is_an_error(characters, change, draws, why):
    shape = dataclasses.replace(SHAPE, **change)
    with pytest.raises(ValueError, match=why):
        jetstream.serve(Engine(tiny.CONFIG, shape, tiny.one_device()), weights(), characters, free_port(), draws)


def test_stop_ends_every_thread_and_a_taken_port_starts_none(characters):
    before = set(threading.enumerate())
    served = Served(characters)
    assert served.decode(GREEDY[1].context, 3) == expected(GREEDY[1:2])[0][0]
    running = set(threading.enumerate())
    with pytest.raises(OSError):
        jetstream.serve(engine(), weights(), characters, served.port)
    assert set(threading.enumerate()) == running
    served.stop()
    names = {thread.name.split("-")[0] for thread in set(threading.enumerate()) - before}
    assert not names & {"prefill", "transfer", "generate", "detokenize"}
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", served.port))
