"""A server that an unmodified huggingface_hub takes for the Hub: for tests, and for the demo without a network."""

from tests.hub.repository import Repository
from tests.hub.server import HubRequest, HubServer

__all__ = ["HubRequest", "HubServer", "Repository"]
