"""Modules that nobody here wrote, as they are, under all methods."""

import pytest
from matrix import ANSWERS, METHODS, PAGE, REASONS, REFUSED, outcome, page
from modules import MODULES

EVERYWHERE = (
    "FedAvg",
    "Ditto",
    "SimFed",
)  # with every module by default; the small LightningTransformer with every method
CELLS = [(name, method) for name in MODULES for method in METHODS]


def cell(name: str, method: str) -> object:
    quick = method in EVERYWHERE or name == "LightningTransformer"
    return pytest.param(name, method, id=f"{name}-{method}", marks=[] if quick else pytest.mark.full)


@pytest.mark.parametrize(("name", "method"), [cell(*names) for names in CELLS])
def test_a_module_trains_or_is_refused_in_one_line(name, method):
    module, reason = MODULES[name], REFUSED[name].get(method)
    pytest.importorskip(module.library)
    seen = outcome(name, method)
    if reason is None:
        assert not seen.line
    else:
        assert REASONS[reason][0] in seen.line
        assert "\n" not in seen.line
        if reason not in ANSWERS:
            return
        seen = outcome(name, method, **ANSWERS[reason])
        assert not seen.line
    assert module.scores <= seen.scores


def test_the_page_has_what_is_tested_here():
    assert PAGE.read_text() == page(REFUSED), "run: python tests/third_party/matrix.py"
