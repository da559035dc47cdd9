"""Where the parts of a tensor lie that ranks and files hold: ranges of the flattened tensor, and rectangles."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Elements of a flattened tensor: `count` runs of `run` elements, `stride` apart. One run is a range, several are
    a rectangle of a matrix whose rows have `stride` elements."""

    start: int  # index of the first element
    run: int
    count: int = 1
    stride: int = 1

    @property
    def size(self) -> int:
        return self.run * self.count

    @property
    def end(self) -> int:
        return self.start + (self.count - 1) * self.stride + self.run

    def of(self, flat: Tensor) -> Tensor:
        """These elements of a flattened tensor: a view (count, run)."""
        return flat.as_strided((self.count, self.run), (self.stride, 1), flat.storage_offset() + self.start)

    def runs_in(self, start: int, end: int) -> range:
        """The numbers of the runs that may have some of the elements `start` to `end`."""
        if self.count < 2:
            return range(self.count)
        first = max(0, (start - self.start - self.run) // self.stride + 1)
        return range(first, min(self.count, -(-(end - self.start) // self.stride)))

    def shared(self, other: "Place") -> Iterator[tuple[int, int, int]]:
        """The elements that both have: where each run of them begins among these and the other's, and its length."""
        if self == other:
            yield 0, 0, self.size
            return
        for i in self.runs_in(other.start, other.end):
            a = self.start + i * self.stride
            for j in other.runs_in(a, a + self.run):
                b = other.start + j * other.stride
                first, last = max(a, b), min(a + self.run, b + other.run)
                if first < last:
                    yield i * self.run + first - a, j * other.run + first - b, last - first
