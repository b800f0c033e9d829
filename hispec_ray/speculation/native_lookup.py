"""The lookup in native code: what `drafters` says, guess for guess, in a tenth of the time."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

from hispec_ray.native import library
from hispec_ray.speculation.drafters import ENTRIES, Guess, Lookup
from hispec_ray.speculation.phrases import NONE, Phrases

_POINTER, _NUMBER, _SHARE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_ARGUMENTS = {
    "hispec_phrases": (),
    "hispec_phrases_follow": (_POINTER, _POINTER, _NUMBER, _NUMBER),
    "hispec_phrases_after": (_POINTER, _POINTER, _NUMBER),
    "hispec_phrases_free": (_POINTER,),
    "hispec_lookup": (_POINTER, _NUMBER),
    "hispec_lookup_free": (_POINTER,),
    "hispec_lookup_begin": (_POINTER, _NUMBER, _POINTER, _NUMBER),
    "hispec_lookup_end": (_POINTER, _NUMBER),
    "hispec_lookup_propose": (
        _POINTER, _NUMBER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _NUMBER, _SHARE, _SHARE, _POINTER, _POINTER,
    ),
}  # fmt: skip
_RESULTS = {"hispec_phrases": _POINTER, "hispec_lookup": _POINTER, "hispec_lookup_propose": _NUMBER}


@lru_cache(maxsize=1)
def _kernels() -> ctypes.CDLL:
    found = library.load()
    for name, arguments in _ARGUMENTS.items():
        kernel = getattr(found, name)
        kernel.argtypes, kernel.restype = arguments, _RESULTS.get(name)
    return found


def _free_with(owner: object, free: Callable[[int], None], handle: int) -> None:
    """Free what the handle stands for with its owner; not when the process ends, for a thread that decodes may use it still."""
    weakref.finalize(owner, free, handle).atexit = False


class _NativePhrases:
    """Phrases where the native code looks for them."""

    def __init__(self, phrases: Phrases) -> None:
        kernels = _kernels()
        self.handle: int = kernels.hispec_phrases()
        _free_with(self, kernels.hispec_phrases_free, self.handle)
        for length, grams in phrases.grams.items():
            kernels.hispec_phrases_follow(self.handle, grams.ctypes.data, len(grams), length)
        kernels.hispec_phrases_after(self.handle, phrases.after.ctypes.data, len(phrases.after))


@lru_cache(maxsize=2)
def _native(phrases: Phrases) -> _NativePhrases:
    return _NativePhrases(phrases)


class NativeLookup(Lookup):
    """See the module; phrases, entries: as of `LookupDrafter`. Raises NativeUnavailableError where the kernels cannot be built."""

    def __init__(self, phrases: Phrases = NONE, entries: int = ENTRIES) -> None:
        super().__init__()
        self._kernels = _kernels()
        self._phrases = _native(phrases)
        self._handle: int = self._kernels.hispec_lookup(self._phrases.handle, entries)
        _free_with(self, self._kernels.hispec_lookup_free, self._handle)
        self._guesses, self._chances = array("q"), array("d")

    def _start(self, id: int, ends: Collection[int]) -> None:
        numbers = array("q", ends)
        self._kernels.hispec_lookup_begin(self._handle, id, numbers.buffer_info()[0], len(numbers))

    def _forget(self, id: int) -> None:
        self._kernels.hispec_lookup_end(self._handle, id)

    def _take_up(self, id: int) -> None:
        self._ask(id, (), 0, 1.0, 0.0)

    def propose(self, id: int, tentative: Sequence[int], most: int, least: float, each: float = 0.0) -> list[Guess]:
        guesses = self._ask(id, tentative, most, least, each)
        self._news[id].asked = True
        return guesses

    def _ask(self, id: int, tentative: Sequence[int], most: int, least: float, each: float) -> list[Guess]:
        news = self._news[id]
        read, written = news.read, news.written
        numbers = array("q", (*read, *written, *news.seconds, *tentative))
        guesses, chances = self._guesses, self._chances
        if len(chances) < most:
            guesses.extend([0] * 2 * (most - len(chances)))
            chances.extend([0.0] * (most - len(chances)))
        made = self._kernels.hispec_lookup_propose(
            self._handle, id, numbers.buffer_info()[0], len(read), len(written), len(tentative), most, least, each,
            guesses.buffer_info()[0], chances.buffer_info()[0],
        )  # fmt: skip
        if numbers:
            read.clear()
            written.clear()
            news.seconds.clear()
        return [Guess(guesses[i], chances[i], None if guesses[most + i] < 0 else guesses[most + i]) for i in range(made)]
