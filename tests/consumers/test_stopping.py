"""A signal stops a continuous consumer after its transaction, even if Spark has replaced the handler."""

import signal

import pytest

from coranto_consumers.spark import StopOnSignals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_requests_a_stop_and_wakes_waiters(number):
    before = signal.getsignal(number)
    with StopOnSignals() as stop:
        assert not stop()
        signal.raise_signal(number)
        assert stop()
        assert stop.wait(600)
    assert signal.getsignal(number) is before


def test_the_interrupt_handler_is_reinstalled_after_a_session_replaces_it():
    with StopOnSignals() as stop:
        assert not stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
