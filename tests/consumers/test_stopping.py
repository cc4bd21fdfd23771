"""A signal ends a continuous consumer after its transaction, even if Spark has replaced the handler."""

import signal

import pytest

from coranto_consumers.spark import StopOnSignals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_to_stop_and_wakes_who_waits(number):
    before = signal.getsignal(number)
    with StopOnSignals() as stop:
        assert not stop()
        signal.raise_signal(number)
        assert stop()
        assert stop.wait(600)
    assert signal.getsignal(number) is before


def test_interrupts_are_taken_back_from_a_session_that_has_started_since():
    with StopOnSignals() as stop:
        assert not stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
