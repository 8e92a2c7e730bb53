"""What a process reuses for all clients that it simulates or serves: networks and samples.

Nothing here belongs to a client: a run gives the same result whichever process trains whom.
"""

import torch

from client_app.graphs import Replayed
from client_app.networks import Networks
from client_app.node_config import NodeConfig, client_name, own_architecture, own_splits
from client_app.round import RoundContext, on_device
from client_app.samples import Pixels, Samples
from client_app.setup import build_network, device_for
from client_app.site_privacy import is_site
from models import StagedModel
from protocol.arrays import Arrays
from protocol.config import RunConfig
from protocol.messages import DatasetSpec, RoundRequest
from protocol.processes import keep_freed_memory

# At import: OMP_NUM_THREADS, which Ray sets to a client's share, or all cores.
available_threads = torch.get_num_threads()

samples_cache_bytes = 256 * 2**20  # in each process
client_bytes = 4096  # of a client in that cache, beside its images: about that much was measured


class ProcessCache:
    """The networks of one run, and the samples of the clients that were trained last."""

    def __init__(self) -> None:
        keep_freed_memory()
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self._key: tuple[object, ...] = ()  # the run, its data set and the device
        self._networks: Networks | None = None
        self._samples: dict[frozenset[tuple[str, object]], tuple[Samples, Samples]] = {}
        self._samples_bytes = 0
        Replayed.obstacles = {}

    def networks(
        self, config: RunConfig, data: DatasetSpec, node_config: NodeConfig, device: torch.device
    ) -> Networks:
        """The networks of this run; what belongs to another run is dropped.

        A site opens no file that its server names: it has the initial weights of the run's seed.
        """
        key = config, data, device
        if self._networks is None or self._key != key:
            self.clear()
            self._key = key
            shape, num_classes = data.image_shape, data.num_classes
            from_file = not is_site(node_config)

            def build(name: str) -> StagedModel:
                return build_network(config, shape, num_classes, name, from_file=from_file)

            self._networks = Networks(build, device)
        return self._networks

    def samples(
        self, config: RunConfig, data: DatasetSpec, node_config: NodeConfig, device: torch.device
    ) -> tuple[Samples, Samples]:
        """(training, local test) samples of this client, cached for its next round.

        The most recent clients' samples are cached, up to `samples_cache_bytes`.
        """
        self.networks(config, data, node_config, device)  # drops the samples of another run
        client = frozenset(node_config.items())
        forms = 2 if config.data.flip else 1  # with flips: plain and mirrored

        def size_bytes(own: tuple[Samples, Samples]) -> int:
            return client_bytes + sum(forms * samples.images.nbytes for samples in own)

        own = self._samples.pop(client, None)
        if own is None:
            pixels = Pixels(data.mean, data.std)
            splits = own_splits(config, data, node_config)
            train, test = (Samples(s.images, s.labels, pixels, device) for s in splits)
            own = (train, test)
            self._samples_bytes += size_bytes(own)
        self._samples[client] = own  # the newest is the last
        while self._samples_bytes > samples_cache_bytes and len(self._samples) > 1:
            self._samples_bytes -= size_bytes(self._samples.pop(next(iter(self._samples))))
        return own

    def begin_round(
        self,
        request: RoundRequest,
        node_config: NodeConfig,
        received: Arrays,
        extra: Arrays,
        state: dict[str, Arrays],
        last_accepted_round: int = 0,
    ) -> RoundContext:
        """Everything that a method's client half reads in this round."""
        config, data = request.config, request.data
        torch.set_num_threads(config.train.threads or available_threads)
        device = device_for(str(node_config.get("device", config.train.device)))
        train, test = self.samples(config, data, node_config, device)
        networks = self.networks(config, data, node_config, device)
        return RoundContext(
            config=config,
            client=client_name(node_config),
            round=request.round,
            device=device,
            train_samples=train,
            test_samples=test,
            received=on_device(received, device),
            extra=on_device(extra, device),
            state=state,
            last_accepted_round=last_accepted_round,
            model=networks.network(own_architecture(config, node_config), "local"),
            is_simulated=not is_site(node_config),
            networks=networks,
        )
