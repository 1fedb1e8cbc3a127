"""The actor without Ray: what it asks of its ledger, and how a suspect chunk runs alone."""

import threading
import time

from exspec.actors.generator import Turns
from exspec.pipeline.ledger import Book


def test_a_book_narrows_down_to_the_row_that_kills() -> None:
    """Whatever the process died of was marked; a single row that was marked is bad."""
    book = Book()
    assert (book.begin("p").number, book.begin("p").number) == (1, 2)
    book.mark("p", [8, 9, 10])
    third = book.begin("p")
    assert (third.number, third.suspects, third.bad) == (3, {8, 9, 10}, set())
    book.mark("p", [9])
    fourth = book.begin("p")
    assert (fourth.number, fourth.suspects, fourth.bad) == (3, {8, 10}, {9})  # an attempt that found its row is free
    book.mark("p", [1])
    book.mark("p", [])
    assert book.begin("p").bad == {9}
    assert book.begin("other").number == 1


def test_one_who_must_be_alone_waits_for_all_and_lets_nobody_in() -> None:
    turns, log = Turns(), []
    entered = threading.Event()

    def share(name: str, seconds: float) -> None:
        with turns.shared():
            entered.set()
            log.append(f"{name} in")
            time.sleep(seconds)
            log.append(f"{name} out")

    def alone() -> None:
        with turns.alone():
            log.append("alone in")
            time.sleep(0.05)
            log.append("alone out")

    first = threading.Thread(target=share, args=("first", 0.2))
    first.start()
    entered.wait()
    lonely = threading.Thread(target=alone)
    lonely.start()
    time.sleep(0.05)
    late = threading.Thread(target=share, args=("late", 0))
    late.start()
    for thread in (first, lonely, late):
        thread.join()
    assert log == ["first in", "first out", "alone in", "alone out", "late in", "late out"]
