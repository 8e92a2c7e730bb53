"""Every method trains a network of torchvision's, in whole runs of one round."""

import pytest
from method_fixtures import METHODS
from model_fixtures import small_resnet
from run_fixtures import SMALL

import keel
from protocol.options import ConfigError

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("no_pictures"),
]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_a_resnet_of_torchvisions(name, tmp_path):
    own = {key: value for key, value in SMALL.items() if key not in ("model", "alpha", "lr")}
    keys = own | {
        "method": name,
        "num-rounds": 1,
        "image-size": 16,
        "channels": 3,
        "data-fraction": 0.03,
        "batch-size": 8,
        "partition": "iid",
        "local-test-fraction": 0.2,
        "output-dir": str(tmp_path),
    }
    if not METHODS[name].supports_batch_norm:
        with pytest.raises(ConfigError, match="with BatchNorm") as refused:
            keel.run(keys, model=small_resnet, clients=2, quiet=True)
        assert refused.value.key == "model"
        return
    run = keel.run(keys, model=small_resnet, clients=2, quiet=True)
    assert run.state == "finished"
    assert run.config["model"] == "model_fixtures:small_resnet"
