from rich.progress import Progress

from kvstow.cli import progress as module


def test_steps_that_are_minutes_apart_still_tell_the_time_left(monkeypatch):
    bars, now = [], [0.0]

    class Bar(Progress):
        def __init__(self, *columns, **options):
            super().__init__(*columns, get_time=lambda: now[0], **options)
            bars.append(self)

    monkeypatch.setattr(module, "Progress", Bar)
    with module.progress_bar("reading") as step:
        for done in range(3):
            step(done, 5)
            now[0] += 120
        (task,) = bars[0].tasks
        assert task.time_remaining == 3 * 120
