"""PET is read back from exported files, and then has the backend of metatomic-tc."""

import io
import sys

import pytest
import torch
from metatomic.torch import AtomisticModel
from metatomic_tc.pet import backend_of, recover, replace
from metatomic_tc.pet.recover import replace_exported_backend
from test_pet_backend import ALL, CASES, SETTINGS, assert_same, evaluate, pet_model, systems_of

pytestmark = pytest.mark.filterwarnings("ignore")


def reloaded(model: AtomisticModel) -> AtomisticModel:
    """The model as it comes from a file."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    module = torch.jit.load(file)
    return AtomisticModel(module, module.metadata(), module.capabilities())


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_same_as_stock(case):
    settings = dict(zip(SETTINGS, case, strict=True))
    stock = reloaded(pet_model(**settings).export())
    model, reason = replace_exported_backend(stock)
    if settings["system_conditioning"]:
        assert model is stock and "charges and spins" in reason
        return
    assert reason is None and backend_of(model) == "tc"
    systems = systems_of(ALL, stock)
    outputs = ["energy"]
    per_atom = ["feature", "mtt::aux::energy_last_layer_features"]
    if settings["non_conservative"]:
        outputs += ["non_conservative_stress"]
        per_atom += ["non_conservative_forces"]
    expected = evaluate(stock, systems, outputs, per_atom)
    # TorchScript computes powers in ZBL a little differently
    model = reloaded(model)
    assert_same(evaluate(model, systems, outputs, per_atom), expected)


def test_metadata_and_capabilities_stay():
    stock = reloaded(pet_model().export())
    model, _ = replace_exported_backend(stock)
    assert str(model.metadata()) == str(stock.metadata())
    ours, theirs = model.capabilities(), stock.capabilities()
    assert set(ours.outputs) == set(theirs.outputs)
    for name in ("atomic_types", "interaction_range", "length_unit", "dtype", "supported_devices"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_a_model_that_comes_back_different_is_not_used(monkeypatch):
    """Such as one with a hyperparameter that is not known here."""
    stock = reloaded(pet_model().export())
    rebuild = recover._rebuild

    def wrong(*arguments):
        pet = rebuild(*arguments)
        pet.backend.attention_temperature = 1.0
        for layer in pet.backend.gnn_layers:
            for transformer in layer.trans.layers:
                transformer.attention.temperature = 1.0
        return pet

    monkeypatch.setattr(recover, "_rebuild", wrong)
    model, reason = replace_exported_backend(stock)
    assert model is stock and "of its output energy are not those of the model read back" in reason


def test_reasons(monkeypatch):
    from metatrain.llpr import LLPRUncertaintyModel

    pet = pet_model()
    llpr = LLPRUncertaintyModel({"num_ensemble_members": {}}, pet.dataset_info)
    llpr.set_wrapped_model(pet)
    llpr.to(torch.float64).eval()
    _, reason = replace_exported_backend(reloaded(llpr.export()))
    assert "only PET alone can be read back" in reason

    stock = reloaded(pet_model().export())
    monkeypatch.setattr(replace, "METATRAIN_VERSIONS", ["2031.1"])
    assert "2031.1" in replace_exported_backend(stock)[1]
    monkeypatch.setitem(sys.modules, "metatrain", None)
    assert "pip install metatrain==2031.1" in replace_exported_backend(stock)[1]
