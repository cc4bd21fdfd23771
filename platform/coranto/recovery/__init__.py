"""Recovery of journals and of their consumers: diagnose, plan, approve by hash, act, verify.

`plan` has the data types, `engine` makes plans and executes approved ones. Doctors find and repair damage: `content`
damaged stored fragments, `heads` journals that wait for `reset-head`, and `losses` both of these and permanent losses.
Consumers have their own doctors. `journals` is the entry point of orchestrators.
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
