"""
The rules by which a mode passes or fails, all in one table.

Every rule compares a number of the mode with a yardstick that FP32 itself sets on the same model,
structures and device. No number here was chosen for a model.
"""

from dataclasses import dataclass

PASS, WARN, FAIL = "pass", "warn", "fail"
_ORDER = [PASS, WARN, FAIL]


@dataclass(frozen=True)
class Rule:
    """A number passes up to ``passes`` yardsticks, warns up to ``warns``, and fails above."""

    test: str
    #: name of the number in the report
    quantity: str
    #: what is compared with what, in words
    meaning: str
    unit: str
    passes: float
    warns: float
    #: in ``unit``: numbers up to this pass, whatever the yardstick
    floor: float = 0.0

    def judge(self, value: float, yardstick: float) -> str:
        """``pass``, ``warn`` or ``fail``."""
        if value <= max(self.floor, self.passes * yardstick):
            return PASS
        return WARN if value <= self.warns * yardstick else FAIL


_OWN = (
    "against FP32's own: the largest of its error against FP64, its difference from run to run, "
    "and with the atoms in another order"
)
NEVER = float("inf")

RULES = [
    Rule(
        "single_point", "energy",
        f"error of the energy against FP64, RMS of the structures, {_OWN}; or, if larger, FP32's "
        "RMS error of the energies of atoms, or half of the last place of an energy in FP32",
        "eV/atom", 2, 5, 1e-8,
    ),
    Rule(
        "single_point", "atom_energy_rms",
        "RMS error of the energies of atoms against FP64, against the same",
        "eV", 2, 5, 1e-8,
    ),
    Rule(
        "single_point", "force_rms", f"RMS error of the forces against FP64, {_OWN}",
        "eV/Å", 2, 5, 1e-8,
    ),
    Rule(
        "single_point", "force_rms_worst",
        "the same of one structure, where the mode compares worst with FP32",
        "eV/Å", 2, 5, 1e-8,
    ),
    Rule(
        "single_point", "force_max", f"largest error of a force component, {_OWN}",
        "eV/Å", 3, 8, 1e-7,
    ),
    Rule(
        "single_point", "stress_rms", f"RMS error of the stress against FP64, {_OWN}",
        "eV/Å³", 2, 5, 1e-10,
    ),
    Rule(
        "smoothness", "roughness",
        "RMS second difference, along the curve, of the deviation of the energy from FP64, against "
        "the larger of FP32's, with the atoms as they are and in changing orders",
        "eV", 2, 5, 1e-8,
    ),
    Rule(
        "smoothness", "pull_force_rms",
        "RMS error of the force on the moved atoms along their movement, against FP32's likewise",
        "eV/Å", 2, 5, 1e-8,
    ),
    Rule(
        "conservation", "drift",
        "how much the size of the drift exceeds that of FP32's, against the combined standard "
        "error of the two",
        "meV/atom/ps", 3, 5, 1e-3,
    ),
    Rule(
        "conservation", "fluctuation",
        "RMS of the total energy about its straight line, against FP32's",
        "meV/atom", 1.5, 3, 1e-3,
    ),
    Rule(
        "conservation", "largest",
        "largest change of the total energy since the start, against FP32's",
        "meV/atom", 2, 4, 1e-2,
    ),
    Rule(
        "relaxation", "missed",
        "share of the repeats that do not reach the force, beyond FP32's share",
        "1", 0, 0,
    ),
    Rule(
        "relaxation", "steps",
        "steps more than FP32's (means of the repeats), against the largest of 5 % of FP32's, the "
        "spread of FP32's repeats, and one step",
        "steps", 1, 4,
    ),
    Rule(
        "relaxation", "lowest_force",
        "lowest largest force of the worst repeat (but not below the force that was to be "
        "reached), against FP32's",
        "eV/Å", 2, 5,
    ),
    Rule(
        "speed", "slowdown",
        "time of a step in the best of the sizes over FP32's; a slow mode is never failed, and on "
        "the CPU, where modes are emulated, not judged",
        "1", 1.05, NEVER,
    ),
]  # fmt: skip


def judge(test: str, quantities: dict[str, tuple[float, float]]) -> tuple[str, list[dict]]:
    """
    The verdict of one mode in one test: the worst of its rules.

    :param quantities: value and yardstick by quantity; rules without a value say nothing
    :return: the verdict, and what each rule found
    """
    found = []
    for rule in RULES:
        if rule.test == test and rule.quantity in quantities:
            value, yardstick = quantities[rule.quantity]
            verdict = rule.judge(value, yardstick)
            found.append(
                {
                    "quantity": rule.quantity,
                    "value": value,
                    "yardstick": yardstick,
                    "unit": rule.unit,
                    "verdict": verdict,
                }
            )
    return worst([one["verdict"] for one in found]), found


def worst(verdicts: list[str]) -> str:
    """The worst of some verdicts."""
    return max(verdicts, key=_ORDER.index, default=PASS)


def rules_as_json() -> list[dict]:
    """The table, for the report."""
    return [
        {
            "test": rule.test,
            "quantity": rule.quantity,
            "meaning": rule.meaning,
            "unit": rule.unit,
            "passes": rule.passes,
            "warns": None if rule.warns == NEVER else rule.warns,
            "floor": rule.floor,
        }
        for rule in RULES
    ]
