"""The Serve application that deployments/*.yaml name: an ingress over a coordinator."""

# No `from __future__ import annotations` here: Ray Serve looks at the annotation of build's parameter as it stands.

from ray import serve
from ray.serve import Application

from hispec_ray.config import Settings
from hispec_ray.serving.coordinator import Coordinator
from hispec_ray.serving.ingress import Ingress
from hispec_ray.serving.keys import read_keys


def build(settings: Settings) -> Application:
    """Return the application for these settings, which are what stands under `args:` in a deployment file.

    A deployment file may override every option set here, under `deployments:`.
    """
    # More than the engine runs and lets wait, health checks and refusals included: so its own queue says when it is full (429).
    ongoing = 2 * (settings.scheduler.max_sequences + settings.scheduler.max_queued) + 64
    # What fails once in the constructor (no such model, exits that do not fit it) fails always.
    coordinator = serve.deployment(max_ongoing_requests=ongoing, max_constructor_retry_count=1)(Coordinator)
    ingress = serve.deployment(max_ongoing_requests=ongoing, ray_actor_options={"num_cpus": 0})(Ingress)
    model = settings.model.served_name or settings.model.path
    keys = read_keys(settings.server.api_keys_file, settings.server.api_keys_variable)
    application: Application = ingress.bind(coordinator.bind(settings), model, int(settings.server.max_body_mib * 2**20), keys)
    return application
