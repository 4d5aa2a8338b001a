"""Ctrl-C: the first asks, the second does not, and afterwards all is as before."""

import signal
import threading

import pytest

from qclip.apps.trainer.interrupt import Interrupt


def test_the_first_asks_and_the_second_interrupts():
    with Interrupt() as interrupt:
        assert not interrupt.asked
        signal.raise_signal(signal.SIGINT)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_handler_before_comes_back_even_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), Interrupt():
        _ = 1 / 0
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_it_does_nothing():
    failures = []

    def work():
        try:
            with Interrupt() as interrupt:
                assert not interrupt.asked
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
