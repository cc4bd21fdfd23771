"""Fake doctors for tests of recoveries."""

from __future__ import annotations

from coranto.errors import CorantoError
from coranto.recovery import Diagnosis, Loss, RecoveryStep, Remark, StepKind


class FakeDoctor:
    """A doctor of named subjects, each cured by one step."""

    def __init__(self, *names: str, kind: StepKind = StepKind.RESET_HEAD, losses: tuple[Loss, ...] = ()) -> None:
        self.names = list(names)
        self.kind = kind
        self.losses = losses
        self.failing: set[str] = set()
        self.taken: list[str] = []

    async def diagnose(self) -> Diagnosis:
        steps = [RecoveryStep(self.kind, name, f"heal {name}", facts={"n": 1}) for name in self.names]
        return Diagnosis(steps, self.losses, [Remark("weather", "it rains")])

    async def act(self, step: RecoveryStep) -> str:
        if step.subject in self.failing:
            raise CorantoError("it does not hold still")
        self.taken.append(step.subject)
        self.names.remove(step.subject)
        return "healed"
