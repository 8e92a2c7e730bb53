"""`clients-per-step`: clients trained as one batched model, against one after the other."""

import dataclasses
import re
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from client_fixtures import add_model, assert_close, make_config, small_source, subject_of
from method_fixtures import METHODS
from run_fixtures import without_pictures
from safetensors.torch import load_file
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm

import client_app.process_cache
import client_app.stacked
from client_app import handlers
from client_app.method import Method, Update
from client_app.methods import method_of
from client_app.methods.fedprox import FedProx
from client_app.methods.fedrep import FedRep
from client_app.objective import objective_phase
from client_app.process_cache import ProcessCache
from client_app.round import on_device
from client_app.setup import client_indices
from client_app.split_model import head_of, with_own_head
from client_app.stacked import (
    Stack,
    bytes_of_training,
    check_captured,
    check_stackable,
    clients_that_fit,
    stacked_frozen,
    train_stacked,
)
from client_app.trainer import Duration, Phase, copy_of
from keel.experiments.runs import identity
from models.staged import Stage, Trunk
from server_app.history import read_history
from server_app.inline import InlineGrid, run_inline

STACKABLE = [name for name, cls in METHODS.items() if cls.train is Method.train]
SIZES = (3, 14, 16)  # batches of 8: 1 + 2 + 2 an epoch, the last ones of 3, 6 and 8


def double(arrays):
    return {n: a.double() if a.is_floating_point() else a for n, a in arrays.items()}


def rounds_of(subject, config, cache, sizes=SIZES):
    """Round 2 of clients of different sizes; the first has never taken part."""
    ctx, left, made = *begun(subject, config), []
    for place, num in enumerate(sizes):
        keys = dict(vars(ctx)) | {"networks": cache, "client": f"client-{place:04}"}
        samples = client_app.samples.Samples(
            ctx.train_samples.images[:num].cpu().numpy(),
            ctx.train_samples.labels[place : place + num].cpu().numpy(),
            ctx.train_samples.pixels,
            ctx.device,
        )
        model = cache.network(config, ctx.data, ctx.model.name, "local", ctx.device)
        named = {f.name: keys[f.name] for f in dataclasses.fields(ctx) if f.name != "caches"}
        named |= {"model": model, "train_samples": samples}
        named |= {"state": changed(left, place) if place else {}, "last_accepted_round": 1}
        named["received"] = {n: a.clone() for n, a in double(ctx.received).items()}
        extra = double(ctx.extra) | extra_of(config.rounds.method, model, place)
        named["extra"] = on_device(extra, ctx.device)
        made.append(type(ctx)(**named))
    return made


@pytest.fixture(autouse=True)
def _without_loops():
    """An operation that vmap cannot batch would run client after client: it is an error here."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


@cache
def begun(subject, config):
    """Round 2 of one client, and what the method's first round leaves: for all clients and both
    ways."""
    left = method_of(config).train(subject.round(config, 1, {}, num_clients=8)).state
    return subject.round(config, 2, {}, num_clients=1), left


def changed(groups, place):
    """Other floats for every client."""
    generator = torch.Generator().manual_seed(place)
    return {
        group: {
            n: a + 0.05 * torch.randn(a.shape, generator=generator) if a.is_floating_point() else a
            for n, a in on_device(arrays, torch.device("cpu")).items()
        }
        for group, arrays in groups.items()
    }


def extra_of(method, model, place):
    """FedPAC's prototypes, which are known of some classes, and the head mixed for this client."""
    if method != "fedpac":
        return {}
    known = torch.arange(model.num_classes) % 2
    prototypes = torch.linspace(-1, 1, model.num_classes * model.feature_width)
    heads = {f"head.{n}": a + 0.1 * place for n, a in head_of(model).items()}
    return heads | {
        "prototypes": prototypes.view(model.num_classes, -1),
        "is-known": known.to(prototypes),
    }


def both_ways(subject, sizes=SIZES, **keys):
    """Updates of the clients: one after the other, and together.

    One epoch each; that the next one goes on is shown with MOON, whatever the run.
    """
    config = subject.config(**{"local_epochs": 1, "momentum": 0.9, "weight_decay": 1e-3} | keys)
    method = method_of(config)
    alone, together = (rounds_of(subject, config, ProcessCache(), sizes) for _ in range(2))
    return [method.train(ctx) for ctx in alone], together_of(method, together)


def together_of(method, ctxs):
    """The updates of these clients of one run, trained together."""
    return train_stacked([method] * len(ctxs), ctxs)


def assert_same_updates(alone, together, rtol=1e-9):
    for one, other in zip(alone, together, strict=True):
        assert one.num_steps == other.num_steps
        assert one.arrays.keys() == other.arrays.keys()
        for part in ("arrays", "extra"):
            assert_close(getattr(other, part), getattr(one, part), rtol=rtol, atol=rtol)
        assert one.state.keys() == other.state.keys()
        for group, arrays in one.state.items():
            assert_close(other.state[group], arrays, rtol=rtol, atol=rtol)
        assert other.terms == {k: pytest.approx(v, rel=rtol) for k, v in one.terms.items()}


@pytest.mark.parametrize("method", STACKABLE)
def test_clients_trained_together_are_those_trained_alone(method, in_float64):
    # fedlc's margins are float32; feddecorr divides by sqrt(var + 1e-8), which multiplies rounding
    # by up to 10^4 in each step where a feature is constant
    tolerance = {"fedlc": 1e-5, "feddecorr": 1e-6}.get(method, 1e-9)
    assert_same_updates(*both_ways(subject_of(method)), rtol=tolerance)


@pytest.mark.parametrize(
    "keys",
    [
        {"momentum": 0.0, "clip_norm": 0.5},
        {"lr_decay_epoch": 0.5, "lr_decay": 0.9, "local_epochs": 2},
        {"flip": True, "crop_padding": 2, "local_epochs": 2},
        {"server_optimizer": "fedacg"},
        {"model": "resnet20", "width": 4, "norm": "batch"},
        {"batch_size": 1},
    ],
    ids=lambda keys: next(iter(keys)),
)
@pytest.mark.end_to_end  # many local trainings, as the forms below
@pytest.mark.parametrize("method", ["moon"])
def test_together_is_alone_whatever_the_run(method, keys, in_float64):
    assert_same_updates(*both_ways(subject_of(method), **keys))


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    "keys",
    [
        {"method": "fedcka", "fedcka.similarity": "kernel-cka"},
        {"method": "fedcka", "fedcka.similarity": "frobenius", "fedcka.num-layers": 5},
        {"method": "fedrcl", "fedrcl.mining": "hard"},
        {"method": "fedcl", "fedcl.negatives": "all"},
        {"method": "fedintr", "fedintr.reduction": "sample"},
        {"method": "feddecorr", "feddecorr.form": "paper"},
        {"method": "fedprox", "fedprox.mu": 1.0},
        {"method": "fedprox", "fedprox.mu": 1.0, "fedprox.squared": False},
        {"method": "scaffold", "scaffold.momentum-form": "niid-bench"},
        {"method": "fedreco", "fedreco.k-u": "5 steps", "fedreco.k-v": "2 epochs"},
        {"method": "fedrep", "fedrep.head-epochs": 2, "clip_norm": 0.5},
        {"method": "fedbabu", "fedbabu.fedper-like": True, "fedbabu.part": "head"},
        {"method": "fedcr", "fedcr.reverse": True, "fedcr.samples": 3},
        {"method": "fedpac", "model": "resnet20", "width": 4, "norm": "batch"},
    ],
    ids=lambda keys: "-".join(str(value) for value in keys.values()),
)
def test_every_form_of_a_loss_can_be_stacked(keys, in_float64):
    subject = subject_of(keys.pop("method"))
    assert_same_updates(*both_ways(subject, **keys))


def test_clients_without_a_common_batch_size_are_trained_too(in_float64, monkeypatch):
    """Places 1 and 3 step together, so that their rows are copied and written back."""
    groups, step = [], Stack.step

    def recorded(self, places, *arguments):
        groups.append(places)
        return step(self, places, *arguments)

    monkeypatch.setattr(Stack, "step", recorded)
    sizes = (3, 14, 11, 16)
    assert_same_updates(*both_ways(subject_of("moon"), sizes, local_epochs=2))
    assert [1, 3] in groups  # 8 samples each, while client 2 has 3
    assert sum(map(len, groups)) == 2 * (1 + 2 + 2 + 2)
    assert len(groups) < 2 * (1 + 2 + 2 + 2)


@pytest.mark.parametrize("method", ["fedavg", "fedmlb"])  # fedmlb's gradients pass frozen layers
def test_batches_of_one_sample_under_batch_norm(method, in_float64):
    """All three clients have one: torch's gradient is wrong where they are mapped together."""
    keys = {"model": "resnet20", "width": 4, "norm": "batch"}
    assert_same_updates(*both_ways(subject_of(method), (9, 9, 1), **keys))


def test_gradients_of_losses_are_float32_under_bf16(monkeypatch):
    """Autocast computes the backward pass too in bfloat16 where it runs inside."""
    seen, backward = [], torch.Tensor.backward

    def recorded(self):
        seen.append((self.dtype, torch.is_autocast_enabled("cpu")))
        backward(self)

    monkeypatch.setattr(torch.Tensor, "backward", recorded)
    subject = subject_of("fedavg")
    config = subject.config(local_epochs=1, precision="bf16")
    method = method_of(config)
    ctxs = rounds_of(subject, config, ProcessCache())
    for ctx in ctxs:
        ctx.received.update({n: a.float() for n, a in ctx.received.items()})
    together_of(method, ctxs)
    assert set(seen) == {(torch.float32, False)}


OBSTACLES = {
    "networks": (
        {"client_models": "resnet20,vgg9"},
        "client-models = 'resnet20,vgg9': the clients",
    ),
    "compile": ({"compile": True}, "compile = true compiles the network of one client"),
}


@pytest.mark.parametrize(("keys", "expected"), OBSTACLES.values(), ids=OBSTACLES)
def test_what_cannot_be_stacked_is_refused_in_one_line(keys, expected):
    config = make_config(clients_per_step=4)
    config = dataclasses.replace(
        make_config(**{k: v for k, v in keys.items() if k == "method"}),
        train=dataclasses.replace(config.train, compile=keys.get("compile", False)),
        model=dataclasses.replace(config.model, client_models=keys.get("client_models", "")),
    )
    with pytest.raises(ValueError, match=re.escape(f"clients-per-step = 4: {expected}")) as raised:
        check_stackable(method_of(config), config, torch.nn.Linear(1, 1))
    assert "\n" not in str(raised.value)
    assert "set it to 1" in str(raised.value)


def test_a_method_that_overrides_train_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(METHODS["fedavg"], "train", lambda self, ctx: None)
    config = make_config(clients_per_step=4)
    with pytest.raises(ValueError, match="method = 'fedavg' overrides `train`, for one client"):
        check_stackable(method_of(config), config, torch.nn.Linear(1, 1))


class Reads(FedRep):
    """FedRep, whose loss reads a value of this client that is not among its inputs."""

    value = staticmethod(lambda ctx: torch.tensor(float(len(ctx.train_samples))))

    def phases(self, ctx):
        model, value = with_own_head(ctx, ctx.state), self.value(ctx)
        model.train().requires_grad_(True)
        descent = yield Phase(
            parameters=list(model.parameters()),
            inputs=lambda step: step.x,
            terms=lambda x: {"supervised": (value * model(x)).square().mean()},
            lr=0.1,
            duration=Duration(1, "epochs"),
            **self.optimizer(ctx),
        )
        return Update(copy_of(model), descent.num_steps, descent.terms)

    def optimizer(self, ctx):
        return {}


def reading(value, optimizer=lambda ctx: {}):
    functions = {"value": staticmethod(value), "optimizer": staticmethod(optimizer)}
    return type("Reads", (Reads,), functions)(1, 1, 0)


@pytest.mark.parametrize("key", ["momentum", "weight_decay"])
def test_clients_with_another_momentum_or_weight_decay_are_refused(key):
    method = reading(lambda ctx: 1.0, lambda ctx: {key: 0.1 * int(ctx.client[-1])})
    subject = subject_of("fedrep")
    ctxs = rounds_of(subject, subject.config(local_epochs=1), ProcessCache())
    with pytest.raises(ValueError, match="or with another momentum or weight decay"):
        together_of(method, ctxs)


def test_a_loss_that_captures_what_differs_between_clients_is_refused():
    """Else all clients would train on the value of one of them."""
    subject = subject_of("fedrep")
    config = subject.config(local_epochs=1)
    for value in (reading(lambda ctx: ctx.label_counts), Reads(1, 1, 0)):
        with pytest.raises(ValueError, match=r"phases.* reads 'value', which differs between") as e:
            together_of(value, rounds_of(subject, config, ProcessCache()))
        assert "\n" not in str(e.value)
    same = reading(lambda ctx: torch.tensor(2.0))
    alone = [same.train(ctx) for ctx in rounds_of(subject, config, ProcessCache())]
    together = together_of(same, rounds_of(subject, config, ProcessCache()))
    assert_same_updates(alone, together, rtol=1e-4)


def test_a_trained_tensor_of_another_module_is_refused():
    """The reason was a KeyError with a number."""

    class Prompted(METHODS["fedavg"]):
        def phases(self, ctx):
            phase = objective_phase(self, ctx)
            prompt = torch.nn.Parameter(torch.zeros(3))
            yield dataclasses.replace(phase, parameters=[*phase.parameters, prompt])

    subject = subject_of("fedavg")
    ctxs = rounds_of(subject, subject.config(local_epochs=1), ProcessCache())
    with pytest.raises(ValueError, match=r"^clients-per-step: the phase of .* not a parameter"):
        together_of(Prompted(), ctxs)


class LooksFirst(METHODS["fedavg"]):
    """Measures the loss over the client's samples before it trains."""

    def phases(self, ctx):
        ctx.model.load_state_dict(ctx.received)
        phase = objective_phase(self, ctx)
        before = yield dataclasses.replace(phase, parameters=[], stream="before")
        descent = yield phase
        terms = {"before": before.terms["supervised"], **descent.terms}
        return Update(copy_of(ctx.model), descent.num_steps, terms)


def test_a_phase_that_trains_nothing_can_be_stacked(in_float64):
    """Its loss then had no gradient, and all of its clients failed."""
    subject, method = subject_of("fedavg"), LooksFirst()
    config = subject.config(local_epochs=1)
    alone, together = (rounds_of(subject, config, ProcessCache()) for _ in range(2))
    updates = [method.train(ctx) for ctx in alone]
    assert_same_updates(updates, together_of(method, together))
    assert all(update.terms["before"] > 0 for update in updates)


def test_terms_of_another_kind_may_capture_other_values():
    def phase(kind, value):
        return SimpleNamespace(kind=kind, terms=lambda batch: {"supervised": value * batch})

    check_captured([phase("a", 1), phase("b", 2), phase("a", 1)], "clients-per-step")
    with pytest.raises(ValueError, match="reads 'value', which differs"):
        check_captured([phase("a", 1), phase("b", 2), phase("b", 3)], "clients-per-step")


def test_a_client_may_have_fewer_frozen_networks_than_another():
    one, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    clients = [], [one], [one, one], [one, other]
    shared, separate = stacked_frozen([SimpleNamespace(frozen=frozen) for frozen in clients])
    assert shared == {}
    assert torch.equal(separate["weight"][2], one.weight)
    assert torch.equal(separate["weight"][3], other.weight)


class SharpnessAware(FedRep):
    """The loss at the weights moved along their gradient, by a tenth of its norm."""

    def phases(self, ctx):
        model = with_own_head(ctx, ctx.state).train().requires_grad_(True)

        def terms(batch):
            x, y = batch
            w = dict(model.named_parameters())

            def loss(w):
                return torch.nn.functional.cross_entropy(functional_call(model, w, (x,)), y)

            g = torch.func.grad(loss)(w)
            norm = torch.stack([each.norm() for each in g.values()]).norm()
            return {"supervised": loss({n: w[n] + 0.1 * g[n] / norm for n in w})}

        descent = yield Phase(
            parameters=list(model.parameters()),
            inputs=lambda step: (step.x, step.y),
            terms=terms,
            lr=0.1,
            duration=Duration(1, "epochs"),
        )
        return Update(copy_of(model), descent.num_steps, descent.terms)


def test_a_loss_that_reads_a_gradient_can_be_stacked(in_float64):
    subject, method = subject_of("fedrep"), SharpnessAware(1, 1, 0)
    config = subject.config(local_epochs=1)
    alone = [method.train(ctx) for ctx in rounds_of(subject, config, ProcessCache())]
    together = together_of(method, rounds_of(subject, config, ProcessCache()))
    assert_same_updates(alone, together)


class ByClass(FedProx):
    """FedProx with a loss on one class of each client, or on a number of entries of its own."""

    def begin_round(self, ctx):
        place = int(ctx.client[-1])
        return {place: torch.ones(())} if self.half else torch.ones(1 + place)

    def penalty(self, batch):
        return sum(v * batch.logits[:, k].square().mean() for k, v in batch.prepared.items())


@pytest.mark.parametrize("by_key", [True, False])
def test_inputs_of_another_form_for_each_client_are_refused(by_key):
    """Else all clients would have the keys of one of them."""
    config = subject_of("fedprox").config(local_epochs=1)
    ctxs = rounds_of(subject_of("fedprox"), config, ProcessCache(), sizes=(14, 14))
    method = ByClass(mu=0.1, half=by_key, squared=True)
    with pytest.raises(
        ValueError, match="begin_round, or a phase's inputs, returns other keys, or"
    ):
        together_of(method, ctxs)


def test_tied_weights_are_refused():
    shared = torch.nn.Linear(2, 2)
    config = make_config(clients_per_step=2)
    with pytest.raises(ValueError, match=r"^clients-per-step = 2: model = .* layers share; set it"):
        check_stackable(method_of(config), config, torch.nn.Sequential(shared, shared))


def test_batchnorm_without_momentum_is_refused():
    """It failed in round 1, with vmap's words."""
    config = make_config(clients_per_step=2)
    check_stackable(method_of(config), config, torch.nn.Sequential(torch.nn.BatchNorm2d(2)))
    counting = torch.nn.Sequential(torch.nn.BatchNorm2d(2, momentum=None))
    with pytest.raises(ValueError, match=r"has BatchNorm without momentum.*set it to 1"):
        check_stackable(method_of(config), config, counting)


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.MultiheadAttention(4, 2, dropout=0.1),
        torch.nn.LSTM(4, 4, num_layers=2, dropout=0.1),
    ],
)
def test_dropout_within_a_layer_is_refused_as_well(layer):
    config = make_config(clients_per_step=2)
    with pytest.raises(ValueError, match="has dropout"):
        check_stackable(method_of(config), config, torch.nn.Sequential(layer))
    layer.dropout = 0.0
    check_stackable(method_of(config), config, torch.nn.Sequential(layer))


@pytest.mark.parametrize("kind", [torch.nn.Dropout, torch.nn.Dropout2d, torch.nn.AlphaDropout])
def test_dropout_is_refused_and_one_client_a_step_never(kind):
    dropout = torch.nn.Sequential(kind(0.5))
    for num, is_refused in ((1, False), (2, True)):
        config = make_config(clients_per_step=num)
        with pytest.raises(ValueError, match="dropout") if is_refused else nullcontext():
            check_stackable(method_of(config), config, dropout)
    check_stackable(method_of(config), config, torch.nn.Sequential(kind(0.0)))


@pytest.mark.parametrize("attribute", ["state", "client", "label_counts", "train_samples", "extra"])
def test_a_loss_that_reads_what_differs_between_clients_is_refused(attribute, monkeypatch):
    def supervised(self, batch):
        getattr(batch.ctx, attribute)
        return batch.logits.sum()

    monkeypatch.setattr(METHODS["fedavg"], "supervised", supervised)
    subject = subject_of("fedavg")
    config = subject.config(local_epochs=1)
    ctxs = [
        dataclasses.replace(ctx, extra={"own": torch.zeros(n)})
        for n, ctx in enumerate(rounds_of(subject, config, ProcessCache()))
    ]
    with pytest.raises(ValueError, match=f"the loss reads ctx.{attribute}, which may differ"):
        together_of(method_of(config), ctxs)


def test_clients_that_received_different_arrays_are_refused():
    subject = subject_of("fedavg")
    config = subject.config(local_epochs=1)
    ctxs = rounds_of(subject, config, ProcessCache())
    next(iter(ctxs[2].received.values())).add_(1)
    with pytest.raises(ValueError, match="client-0000 and client-0002 received different arrays"):
        together_of(method_of(config), ctxs)


class Scaled(torch.nn.Module):
    """A convolution times a learnt scalar."""

    def __init__(self, num_channels):
        super().__init__()
        self.convolution = torch.nn.Conv2d(num_channels, 4, 3)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale * self.convolution(x)


@pytest.mark.parametrize("keys", [{"clip_norm": 0.5}, {"fedprox.mu": 1.0}])
def test_a_parameter_without_dimensions_can_be_stacked(keys, in_float64, monkeypatch):
    """Both flattened each client's value from dimension 1 on, which a scalar lacks."""

    def build(input_shape):
        pool = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())
        return Trunk({"conv1": Stage(Scaled(input_shape[0]), torch.nn.ReLU())}, pool, 16)

    add_model(monkeypatch, "scaled", build)
    assert_same_updates(*both_ways(subject_of("fedprox"), model="scaled", **keys))


def spectral(input_shape):
    """A network whose weight is divided by an estimate that each forward pass updates in place."""
    convolution = spectral_norm(torch.nn.Conv2d(input_shape[0], 4, 3))
    pool = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())
    return Trunk({"conv1": Stage(convolution, torch.nn.ReLU())}, pool, 16)


def test_a_layer_that_vmap_cannot_batch_is_named(monkeypatch):
    """Round 1 ended with vmap's words alone."""
    add_model(monkeypatch, "spectral", spectral)
    subject = subject_of("fedprox")
    config = subject.config(model="spectral", clients_per_step=2, local_epochs=1)
    ctxs = rounds_of(subject, config, ProcessCache(), sizes=(14, 14))
    with pytest.raises(ValueError) as error:
        together_of(method_of(config), ctxs)
    assert re.fullmatch(
        r"clients-per-step = 2: layer stages\.conv1\.body\.parametrizations\.weight\.0 cannot be "
        r"computed for several clients at once \(.*[^.]\); set it to 1",
        str(error.value),
    )


# --- on the inline engine -----------------------------------------------------------------------


def run_of(folder, num_clients_per_step, **keys):
    """The run directory of 2 rounds of 5 clients."""
    given = {
        "source": small_source(), "model": "cnn-fedreco", "partition": "dirichlet", "alpha": 5.0,
        "min-samples": 5, "num-rounds": 2, "local-epochs": 2, "batch-size": 8, "method": "moon",
        "output-dir": str(folder / str(num_clients_per_step)), "local-test-fraction": 0.2,
        "evaluate-clients": "all", "clients-per-step": num_clients_per_step, "device": "cpu",
        "keep-state": True,
    }  # fmt: skip
    with without_pictures():
        return run_inline(given | keys, 5)


@pytest.mark.end_to_end
def test_a_run_with_stacked_clients_is_the_run_without_up_to_rounding(tmp_path):
    alone, together = run_of(tmp_path, 1), run_of(tmp_path, 2)
    one, other = (load_file(run / "model.safetensors") for run in (alone, together))
    assert_close(other, one, rtol=0, atol=1e-5)
    lines, others = read_history(alone), read_history(together)
    for line, stacked in zip(lines, others, strict=True):
        assert stacked["participants"] == line["participants"]
        assert not stacked["left_out"]
        assert stacked["losses"] == {
            k: pytest.approx(v, rel=1e-4) for k, v in line["losses"].items()
        }
    paths = [
        sorted(p.parent.name for p in run.glob("clients/*/round-*")) for run in (alone, together)
    ]
    assert paths[0] == paths[1]
    assert len(set(paths[0])) == 5


@pytest.mark.end_to_end
def test_a_client_that_cannot_begin_fails_alone(tmp_path, monkeypatch):
    prepare = handlers.prepare

    def fails_once(request, message, context, before_round):
        if context.node_config["partition-id"] == 1:
            raise ValueError("no disk")
        return prepare(request, message, context, before_round)

    monkeypatch.setattr(handlers, "prepare", fails_once)
    lines = read_history(run_of(tmp_path, 5, method="fedavg", **{"evaluate-clients": "none"}))
    assert [list(line["left_out"]) for line in lines] == [["client-0001"]] * 2
    assert all("no disk" in line["left_out"]["client-0001"] for line in lines)


def test_a_training_that_fails_is_an_error_of_each_of_its_clients(tmp_path, monkeypatch):
    def fails(self, batch):
        raise ValueError("out of memory")

    monkeypatch.setattr(METHODS["fedavg"], "supervised", fails)
    with pytest.raises(RuntimeError, match=r"0 accepted replies.*client-0000, .*out of memory"):
        run_of(tmp_path, 5, method="fedavg")


@pytest.mark.end_to_end
def test_a_run_that_cannot_be_stacked_ends_before_round_1(tmp_path):
    keys = {"method": "fedreco", "client-models": "cnn-fedreco,cnn-fedreco"}
    with pytest.raises(ValueError, match=r"clients-per-step = 2: client-models = .* differ"):
        run_of(tmp_path, 2, **keys)
    run_of(tmp_path, 0, **keys)  # automatic: one client at a time


# --- memory -------------------------------------------------------------------------------------


FEDAVG = {"method": "fedavg", "evaluate-clients": "none", "run-name": "full"}


class FullMemory:
    """`train_stacked` on a device whose memory holds `most` clients."""

    def __init__(self, most, error):
        self.most, self.error, self.tried = most, error, []

    def __call__(self, methods, ctxs):
        self.tried.append(len(ctxs))
        if len(ctxs) > self.most:
            raise self.error
        return train_stacked(methods, ctxs)


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("alone"), 1, **FEDAVG)


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("most", "tried", "error"),
    [
        (2, [5, 2, 2, 2, 2], torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")),
        (1, [5, 2], RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")),
    ],
)
def test_clients_that_do_not_fit_in_memory_train_fewer_at_a_time(
    most, tried, error, trained_alone, tmp_path, monkeypatch, caplog
):
    full = FullMemory(most, error)
    monkeypatch.setattr(handlers, "train_stacked", full)
    together = run_of(tmp_path, 5, **FEDAVG)
    assert full.tried == tried  # 5 clients in 2 rounds: 2 + 2 + 1, the last of which trains alone
    lines = [r.getMessage() for r in caplog.records if "do not fit" in r.getMessage()]
    assert len(lines) == tried.index(2) + (most == 1)  # once, and not again in round 2
    assert "5 clients do not fit into the memory of cpu: 2 at a time train together" in lines[0]
    one, other = (load_file(run / "model.safetensors") for run in (trained_alone, together))
    assert_close(other, one, rtol=0, atol=1e-5)


@pytest.mark.end_to_end
def test_private_clients_that_train_again_have_released_once(tmp_path, monkeypatch):
    """Clients that had trained before memory ran out failed: `privatise` was called twice."""
    tried = []

    def full(methods, ctxs):
        tried.append(len(ctxs))
        if len(tried) in (1, 3):  # five clients, then the second pair
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return train_stacked(methods, ctxs)

    monkeypatch.setattr(handlers, "train_stacked", full)
    private = {"privacy.epsilon": 0.5, "privacy.clip-norm": 1.0, "num-rounds": 1}
    run = run_of(tmp_path, 5, **FEDAVG, **private)
    assert tried == [5, 2, 2]
    [line] = read_history(run)
    assert (len(line["participants"]), line["left_out"]) == (5, {})


def test_one_client_that_does_not_fit_is_an_error_of_one_line(tmp_path, monkeypatch):
    def fails(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr(METHODS["fedavg"], "supervised", fails)
    with pytest.raises(RuntimeError, match="CUDA out of memory: lower batch-size, cache-mb") as e:
        run_of(tmp_path, 2, method="fedavg")
    assert "\n" not in str(e.value)


def test_as_many_clients_as_half_of_the_free_memory_holds(monkeypatch):
    subject = subject_of("fedavg")
    config = subject.config(batch_size=8, cache_mb=3)
    ctx, method = subject.round(config, 1, {}), method_of(config)
    model, data, cuda = ctx.model, ctx.data, torch.device("cuda")
    one = bytes_of_training(config, model, data, ctx.device, 60)
    weights = sum(array.nbytes for array in model.state_dict().values())
    batch = 8 * 4 * int(torch.tensor(data.image_shape).prod())
    assert one > 6 * weights + 2 * batch + 3 * 2**20
    larger = subject.config(batch_size=16, cache_mb=5)
    twice = one + 2 * 2**20 + 2 * batch
    assert bytes_of_training(larger, model, data, ctx.device, 60) > twice
    halves = subject.config(batch_size=8, batches_per_epoch=4, cache_mb=5)  # batches of 15 or 16
    assert bytes_of_training(halves, model, data, ctx.device, 61) > twice
    monkeypatch.setattr(client_app.stacked, "bytes_of_training", lambda *a: one)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: one)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)

    def fitting(free, config=config, device=cuda):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
        return clients_that_fit(method, config, model, data, device, 60)

    assert [fitting(n * one) for n in (0, 3, 19, 20)] == [1, 2, 10, 10]
    assert fitting(20 * one, device=torch.device("cpu")) == 1
    compiled = dataclasses.replace(config, train=dataclasses.replace(config.train, compile=True))
    assert fitting(20 * one, compiled) == 1  # cannot be stacked


def test_the_largest_client_says_how_many_clients_fit(tmp_path, monkeypatch):
    """By its batches, with `batches-per-epoch`."""
    seen = []

    def fit(method, config, model, data, device, num_samples):
        sizes = [len(client_indices(config, n, 5)[0]) for n in range(5)]
        seen.append((num_samples, max(sizes), len(set(sizes))))
        return 2

    monkeypatch.setattr(handlers, "clients_that_fit", fit)
    devices = {"cpu": torch.device("cpu"), "auto": torch.device("meta")}  # for want of a GPU
    monkeypatch.setattr(handlers, "device_for", devices.get)
    run_of(tmp_path, 0, method="fedavg", device="auto", **{"batches-per-epoch": 2})
    num_samples, expected, num_sizes = seen[0]
    assert num_samples == expected
    assert num_sizes > 1


def test_other_engines_refuse_stacked_clients(tmp_path, monkeypatch):
    monkeypatch.setattr(InlineGrid, "stacks_clients", False)
    with pytest.raises(ValueError, match="only the inline engine trains clients together"):
        run_of(tmp_path, 2)


@pytest.mark.parametrize("key", ["clients_per_step", "stacked_runs"])
def test_stacking_is_part_of_a_runs_identity(key):
    alone, together = (make_config(**{key: num}).flat for num in (1, 2))
    assert identity(alone) != identity(together)
