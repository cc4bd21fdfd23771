"""Recovery of journals and of their consumers: diagnose, plan, approve by hash, act, verify.

`plan` has the values, `engine` makes plans and carries approved ones out. Doctors find and mend damage: `content` that
of stored fragments, `heads` journals that wait for `reset-head`, and `losses` both of these and what is gone for good.
Consumers have doctors of their own. `journals` is what orchestrators run.
"""

from coranto.recovery.content import ContentDoctor
from coranto.recovery.engine import Doctor, NotApproved, Recovery, StepResult, carry_out, make_plan
from coranto.recovery.heads import HeadDoctor, reset_head
from coranto.recovery.journals import JournalsRecovery, MoreAudits, MoreDoctors
from coranto.recovery.losses import JournalDoctor
from coranto.recovery.plan import Diagnosis, Loss, Plan, RecoveryStep, Remark, StepKind

__all__ = [
    "ContentDoctor",
    "Diagnosis",
    "Doctor",
    "HeadDoctor",
    "JournalDoctor",
    "JournalsRecovery",
    "Loss",
    "MoreAudits",
    "MoreDoctors",
    "NotApproved",
    "Plan",
    "Recovery",
    "RecoveryStep",
    "Remark",
    "StepKind",
    "StepResult",
    "carry_out",
    "make_plan",
    "reset_head",
]
